"""Moments of a step are its seconds and its peak, whatever is recomputed, moved or gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.graph import Ref
from autopar.core.timeline import Phase
from autopar.cost.program.moments import moments
from autopar.cost.program.priced_program import PricedProgram
from autopar.results.plan.plan import Plan
from autopar.sharding.strategies import find_atoms
from tests.cost.operators.test_prices import anew, priced
from tests.forced_programs import force_factors
from tests.proof.models import Script

NODE = ClusterSpec(
    devices_per_node=2,
    device="h200",
    intra=Link(latency=1e-6, bandwidth=50e9),
    host=Link(latency=1e-6, bandwidth=2e9),
)


class Blocks(nn.Module):
    """What backward keeps a lot of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def planned(**options: Any) -> Plan:
    inputs = torch.zeros(512, 64), torch.zeros(512, dtype=torch.long)
    asked = {"measure": False, "stages": 1, "micro_batches": 1} | options
    return autopar.plan(Blocks(), NODE, inputs, loss_fn=F.cross_entropy, **asked)


@pytest.mark.parametrize(
    ("options", "phase"),
    [
        ({}, Phase.BACKWARD),
        ({"recompute": "all"}, Phase.RECOMPUTE),
        ({"offload": "all", "recompute": "none"}, Phase.COPIES),
        ({"micro_batches": 4}, Phase.OPTIMIZER),
        ({"shard_state": "weights", "force": "batch"}, Phase.SUMS),
    ],
    ids=lambda value: "" if isinstance(value, Phase) else " ".join(value) or "plain",
)
def test_moments_add_up_to_the_step_and_their_most_is_its_peak(options: dict[str, Any], phase: Phase) -> None:
    plan = planned(**options)
    count = plan.pipeline.micro_batches
    seconds = sum(each.seconds * (1 if each.phase.is_once else count) for each in plan.moments)
    assert seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert max(each.nbytes for each in plan.moments) == plan.peak_bytes
    assert phase in {each.phase for each in plan.moments}
    assert autopar.timeline(plan).seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert autopar.timeline(plan).peak.nbytes == plan.peak_bytes


def test_memory_rises_to_the_end_of_forward_and_falls_to_what_lasts() -> None:
    plan = planned()
    last = len(plan.layers) - 1
    order = [(each.phase, each.layer) for each in plan.moments]
    assert order.index((Phase.FORWARD, last)) < order.index((Phase.BACKWARD, last))
    backward = [layer for phase, layer in order if phase is Phase.BACKWARD]
    assert backward == sorted(backward, key=lambda layer: -(layer or 0))
    by_place = {(each.phase, each.layer): each.nbytes for each in plan.moments}
    assert by_place[Phase.FORWARD, 0] < by_place[Phase.FORWARD, 4]  # a block more is kept
    assert plan.moments[-1].nbytes <= by_place[Phase.FORWARD, 0]


def test_evaluation_is_forward_alone() -> None:
    script = Script()
    made = script.linear(script.user(4, 3), 5)
    loss = script.call(torch.ops.aten.sum.default, Ref(made))
    graph = script.graph(loss)
    prices = anew(priced(graph, find_atoms(graph)), training=False)
    program = PricedProgram(prices, force_factors(graph, prices.dims, {made: "n0", loss: "d0"}))
    found = moments(program)
    assert [(each.phase, each.layer) for each in found] == [(Phase.FORWARD, 0), (Phase.FORWARD, 1)]
    assert sum(each.seconds for each in found) == pytest.approx(program.seconds)
    assert max(each.nbytes for each in found) == program.peak.nbytes
