"""The pure strategies for three nets: seconds of communication and bytes of a device, by formula and by plan.

    P devices, batch B, S micro-batches, layers l with x, y, w numbers of d bytes, a link of alpha and beta

    data       2 ((P - 1) alpha + (P - 1)/P sum w d beta)                 2 d sum(B/P (x + y) + w)
    spatial    data's + sum 2 (2 alpha + B (halo(x) + halo(y)) d beta)    2 d sum(B (x + y)/P + w)
    filter,    3 (P - 1) sum(alpha + B y/P d beta)                        2 d sum(B (x + y) + w/P)
    channel
    layer      2 (P + S - 2) max(alpha + B/S y d beta)                    2 d sum(B (x + y) + w) of a stage

Plans force the strategy; that of layers runs GPipe.

Published is the formulas' accuracy, not a number of these nets: 86.7 % on average.

Source: Kahira et al., An oracle for guiding large-scale model/hybrid parallel training of convolutional
neural networks, HPDC 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.errors import InfeasibleError
from autopar.results.plan.plan import Plan
from autopar.units import show_bytes, show_seconds
from tests.benchmarks.sources.figures import FigureRow, FigureTable
from tests.benchmarks.sources.nets import NetLayer, layers_of, on_meta, resnet50, vgg16, volume_net

DEVICES = 8
MICRO_BATCHES = 8
BYTES = 4
LINK = Link(5e-6, 130e9)
BATCHES: tuple[tuple[Callable[[], nn.Module], int], ...] = ((resnet50, 256), (vgg16, 256), (volume_net, 16))
REASONS: Mapping[str, str] = {
    "data": "ResNet-50's plan sums statistics of 53 batch norms; the formula has each tensor twice in memory "
    "and all gradients at once",
    "spatial": "the plan's rows of both sides travel at the same time; ResNet-50 sums statistics",
    "filter": "the plan gathers and reduce-scatters, the formula sums whole; layers share a gather",
    "channel": "the plan chooses for each layer what is summed and what scattered",
    "layer": "hops of the plan, where the formula has the largest in every slot; waits are beside them",
}
PLANS: Mapping[str, Mapping[str, Any]] = {  # options of the plan that each formula is of
    "data": {"force": Parallelism.BATCH},
    "spatial": {"force": Parallelism.DOMAIN},
    "filter": {"force": Parallelism.FILTER},
    "channel": {"force": Parallelism.CHANNEL},
    "layer": {"stages": DEVICES, "micro_batches": MICRO_BATCHES, "schedule": "gpipe"},
}


@dataclass(frozen=True, slots=True)
class Projected:
    """What a formula says of one strategy; `limit` is the most devices that it takes."""

    seconds: float
    nbytes: float
    limit: int


def project(
    layers: Sequence[NetLayer],
    batch: int,
    size: int,
    *,
    link: Link = LINK,
    micro_batches: int = MICRO_BATCHES,
) -> dict[str, Projected]:
    """The table of formulas for one net."""
    alpha, beta = link.latency, BYTES / link.bandwidth  # of a number
    weights = sum(layer.w for layer in layers)
    kept = batch * sum(layer.x + layer.y for layer in layers)
    data = 2 * ((size - 1) * alpha + (size - 1) / size * weights * beta)
    halos = sum(2 * (2 * alpha + batch * (e.halo_x + e.halo_y) * beta) for e in layers if e.halo_x)
    gathers = 3 * (size - 1) * sum(alpha + batch * layer.y / size * beta for layer in layers)
    windowed = [layer for layer in layers if layer.is_windowed]
    split = Projected(data, 2 * BYTES * (kept / size + weights), batch)
    whole = 2 * BYTES * (kept + weights / size)
    stages = balanced(layers, size)
    crossing = [stage[-1].y for stage in stages[:-1]]
    hops = max((alpha + batch / micro_batches * y * beta for y in crossing), default=0.0)
    return {
        "data": split,
        "spatial": Projected(data + halos, split.nbytes, min(layer.positions for layer in windowed)),
        "filter": Projected(gathers, whole, min(layer.outputs for layer in layers)),
        "channel": Projected(gathers, whole, min(layer.inputs for layer in layers[1:])),
        "layer": Projected(
            2 * (size + micro_batches - 2) * hops,
            max(stage_bytes(stage, batch) for stage in stages),
            len(layers),
        ),
    }


def stage_bytes(stage: Iterable[NetLayer], batch: int) -> float:
    """Bytes of a stage's activations and weights, with their gradients."""
    return 2 * BYTES * sum(batch * (layer.x + layer.y) + layer.w for layer in stage)


def balanced(layers: Sequence[NetLayer], count: int) -> list[Sequence[NetLayer]]:
    """At most so many stages of layers in order, none with more flops than is needed."""
    sums = list(accumulate((layer.flops for layer in layers), initial=0))
    spans = [(first, last) for first in range(len(layers)) for last in range(first + 1, len(layers) + 1)]
    for most in sorted(sums[last] - sums[first] for first, last in spans):
        stages = filled(layers, most)
        if stages is not None and len(stages) <= count:
            return stages
    raise AssertionError("one stage holds all layers")


def filled(layers: Sequence[NetLayer], most: int) -> list[Sequence[NetLayer]] | None:
    """Stages that each take layers up to so many flops; None where one layer alone has more."""
    stages: list[list[NetLayer]] = [[]]
    for layer in layers:
        if layer.flops > most:
            return None
        if sum(each.flops for each in stages[-1]) + layer.flops > most:
            stages.append([])
        stages[-1].append(layer)
    return list(stages)


def planned(make: Callable[[], nn.Module], batch: int, strategy: str) -> Plan | None:
    """The plan of one strategy on a flat mesh, None where there is none."""
    model, x = on_meta(make, batch)
    y = torch.empty(batch, dtype=torch.long, device="meta")
    cluster = ClusterSpec(devices_per_node=DEVICES, device="v100", memory="1TB", intra=LINK)
    mesh = {} if strategy == "layer" else {"mesh": Mesh((DEVICES,))}
    options = {"measure": False, "optimizer": "sgd", **mesh, **PLANS[strategy]}
    try:
        return autopar.plan(model, cluster, (x, y), loss_fn=F.cross_entropy, **options)
    except InfeasibleError:
        return None


def table() -> FigureTable:
    """Five strategies for each net."""
    rows = []
    for make, batch in BATCHES:
        for name, each in project(layers_of(make), batch, DEVICES).items():
            formula = f"{show_seconds(each.seconds)}, {show_bytes(each.nbytes)}, P <= {each.limit:,}"
            rows.append(
                FigureRow(
                    f"{make.__name__}, B = {batch}, {name}",
                    formula,
                    told(planned(make, batch, name)),
                    reason=REASONS[name],
                )
            )
    title = f"Pure strategies on {DEVICES} V100s, {LINK}: communication and memory"
    return FigureTable.of(title, "by plan: communication, memory, step", rows)


def told(plan: Plan | None) -> str:
    """Communication with all waits for other stages' messages, the peak, and the step."""
    if plan is None:
        return "no plan"
    parts = plan.parts
    seconds = parts.communication + parts.sums + parts.hidden + parts.hops
    return f"{show_seconds(seconds)}, {show_bytes(plan.peak_bytes)}, {show_seconds(plan.step_seconds)}"
