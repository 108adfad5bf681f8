"""Batch, domain and model parallelism together on P = Pr x Pc processes: elements that each one sends.

    model layer     gathers   B/Pc (Pr - 1)/Pr d_i          forward
                    reduces 2 B/Pc (Pr - 1)/Pr d_(i-1)      backward, but for the first layer
                    reduces 2 (Pc - 1)/Pc |W|/Pr            its gradient
    domain layer    halos     B/Pc (halo(x) + halo(y))      forward, and backward
                    reduces 2 (P - 1)/P |W|                 its gradient
    batch layer     reduces 2 (P - 1)/P |W|                 Pr = 1

Linear layers are model layers; convolutions are all domain or all model layers, whichever sends less. A
domain layer has at least a row for each of Pr. The paper's own figures are drawn: no number of them is known
here. Plans take the same grid, and choose on it for each layer.

Source: Gholami et al., Integrated model, batch and domain parallelism, SPAA 2018.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.results.plan.plan import Plan
from autopar.units import show_bytes, show_seconds
from tests.benchmarks.sources.figures import FigureRow, FigureTable
from tests.benchmarks.sources.nets import NetLayer, alexnet, layers_of, on_meta

BATCH = 2048
PROCESSES = (8, 64, 512, 4096)
NUMBER_BYTES = 4
BATCH_REASON = "the plan adds latencies of each bucket, and biases"
GRID_REASON = "the plan chooses for each layer; the formula has one way for all convolutions"
NETWORK = Link(2e-6, 6e9)  # of each device, to every other one


@dataclass(frozen=True, slots=True)
class IntegratedGrid:
    """A grid of processes, how its convolutions are split, and the elements that each process sends."""

    rows: int
    columns: int
    convolutions: str
    elements: float


def model_elements(layers: Sequence[NetLayer], batch: int, rows: int, columns: int) -> float:
    """Elements that a process sends for layers split by their weights."""
    share, local = (rows - 1) / rows, batch / columns
    total = 0.0
    for place, layer in enumerate(layers):
        total += local * share * layer.y
        total += 2 * local * share * layer.x if place or not layer.is_windowed else 0
        total += 2 * (columns - 1) / columns * layer.w / rows
    return total


def domain_elements(layers: Sequence[NetLayer], batch: int, rows: int, columns: int) -> float:
    """Elements that a process sends for layers split in space, or with one row by samples alone."""
    size = rows * columns
    halos = sum(layer.halo_x + layer.halo_y for layer in layers) if rows > 1 else 0
    return batch / columns * halos + 2 * (size - 1) / size * sum(layer.w for layer in layers)


def grids(layers: Sequence[NetLayer], batch: int, size: int) -> Iterator[IntegratedGrid]:
    """All grids of so many processes, with convolutions split either way."""
    windowed = [layer for layer in layers if layer.is_windowed]
    linear = [layer for layer in layers if not layer.is_windowed]
    for rows in (rows for rows in range(1, size + 1) if size % rows == 0):
        columns = size // rows
        if columns > batch or rows > min(layer.outputs for layer in layers):
            continue
        rest = model_elements(linear, batch, rows, columns)
        yield IntegratedGrid(rows, columns, "model", rest + model_elements(windowed, batch, rows, columns))
        if rows <= min(layer.rows for layer in windowed):
            yield IntegratedGrid(
                rows, columns, "domain", rest + domain_elements(windowed, batch, rows, columns)
            )


def planned(rows: int, columns: int) -> Plan:
    """The plan on such a grid of V100s, on one network that treats all alike; of one row the batch plan."""
    model, x = on_meta(alexnet, BATCH)
    labels = torch.empty(BATCH, dtype=torch.long, device="meta")
    cluster = ClusterSpec(devices_per_node=rows * columns, device="v100", memory="32GB", intra=NETWORK)
    options: dict[str, Any] = {"mesh": Mesh((columns, rows) if rows > 1 else (columns,))}
    options |= {"force": Parallelism.BATCH} if rows == 1 else {}
    return autopar.plan(
        model, cluster, (x, labels), loss_fn=F.cross_entropy, measure=False, optimizer="sgd", **options
    )


def exchanged(plan: Plan) -> float:
    """Seconds of all of a plan's communication, hidden or not."""
    return plan.parts.communication + plan.parts.sums + plan.parts.hidden


def sent(elements: float) -> str:
    """Bytes, and seconds on the network without its latency."""
    nbytes = NUMBER_BYTES * elements
    return f"{show_bytes(nbytes)}, {show_seconds(nbytes / NETWORK.bandwidth)}"


def table(processes: Sequence[int] = PROCESSES) -> FigureTable:
    """Pure batch parallelism and the best grid, for each number of processes."""
    layers, rows = layers_of(alexnet), []
    for size in processes:
        if size <= BATCH:
            batch = domain_elements(layers, BATCH, 1, size)
            rows.append(
                FigureRow(f"P = {size:,}, batch", sent(batch), _plan(planned(1, size)), reason=BATCH_REASON)
            )
        best = min(grids(layers, BATCH, size), key=lambda each: each.elements)
        named = f"P = {size:,}, {best.rows} x {best.columns}, convolutions by {best.convolutions}"
        rows.append(
            FigureRow(named, sent(best.elements), _plan(planned(best.rows, best.columns)), reason=GRID_REASON)
        )
    title = f"AlexNet, batch {BATCH:,}: what a process sends in a step, {NETWORK}"
    return FigureTable.of(title, "by plan: communication, mesh, step", rows)


def _plan(plan: Plan) -> str:
    return f"{show_seconds(exchanged(plan))}, {plan.mesh}, {show_seconds(plan.step_seconds)}"
