"""Weights on the host: where a cap asks for them, as many as it asks for, at the price of their copies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.cost.operators.host_weights import stream_seconds
from autopar.cost.operators.prices import Prices
from autopar.cost.program.offload import wait_seconds
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import InfeasibleError
from autopar.results.plan.plan import Plan
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from tests.deep_net import Deep
from tests.forced_programs import force_kinds, traced
from tests.runtime.forced_compiler import ROUGH

WIDTH, LAYERS = 64, 12
LAYER = WIDTH * WIDTH * 4  # bytes of a matrix in float32
STATE = 4 * LAYERS * LAYER  # weights, gradients and what Adam keeps
CAP = STATE // 4
UNIT = Link(bandwidth=1.0, latency=1.0)  # 1 byte/s, after 1 s


def cluster(**other: Any) -> ClusterSpec:
    return ClusterSpec(nodes=1, devices_per_node=1, device="h100", intra=UNIT, **other)


def plan(memory: int, *, room: int | None = None, **options: Any) -> Plan:
    """A plan for one H100 of so many bytes, with a PCIe link to a host with so much room."""
    host = Link(bandwidth=25e9, latency=1e-5)
    where = cluster(host=host, host_memory=room)
    words = {"memory": memory, "measure": False, "stages": 1, "micro_batches": 1} | options
    return autopar.plan(Deep(LAYERS), where, (torch.randn(8, WIDTH),), **words)


def test_a_cap_that_nothing_else_meets_sends_weights_to_the_host() -> None:
    found = plan(CAP)
    hosted = len(found.program.on_host)
    assert 0 < hosted < LAYERS and found.peak_bytes <= CAP
    assert found.host_bytes == hosted * (4 * LAYER + 4) and found.offload_seconds > 0.0
    assert "lie in host memory" in str(found) and found.as_dict()["host"]["weights"]
    assert found.parts.copies == pytest.approx(found.offload_seconds)
    assert sum(found.parts.as_dict().values()) - found.parts.hidden == pytest.approx(found.step_seconds)


def test_where_there_is_memory_none_do() -> None:
    found = plan(2 * STATE)
    assert not found.program.on_host and found.host_bytes == 0


def test_more_memory_keeps_more_weights_on_the_device() -> None:
    counts = [len(plan(STATE // part).program.on_host) for part in (2, 4, 8)]
    assert counts == sorted(counts) and counts[0] < counts[-1]


@pytest.mark.parametrize("options", [{"offload": "none"}, {"room": STATE // 2}])
def test_without_a_host_that_has_room_there_is_no_plan(options: dict[str, Any]) -> None:
    with pytest.raises(InfeasibleError):
        plan(CAP, **options)


def test_weights_on_the_host_are_gathered_for_each_micro_batch() -> None:
    """What leads from where a weight is stored is made once a step, but not where that is the host."""
    pairs = ((nn.Linear(512, 512), nn.ReLU()) for _ in range(3))
    model = nn.Sequential(*itertools.chain.from_iterable(pairs), nn.Linear(512, 10))
    words: dict[str, Any] = {"offload": "state", "micro_batches": 2, "stages": 1, "measure": False}
    batch = torch.randn(8, 512), torch.arange(8)
    found = autopar.plan(
        model, ClusterSpec.local(2), batch, loss_fn=F.cross_entropy, memory=1_150_000, **words
    )
    assert found.pipeline.micro_batches == 2 and found.program.on_host
    assert Gathering.ONCE not in found.program.gatherings.values()


def test_cpus_without_a_plan_are_told_of_weights_on_the_host() -> None:
    with pytest.raises(InfeasibleError, match=r"host's memory \(--offload state\), which would need"):
        autopar.plan(
            Deep(LAYERS), ClusterSpec.local(1), (torch.randn(8, WIDTH),), memory=CAP, measure=False, stages=1
        )


def test_a_host_without_room_for_all_of_the_state_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="pinned.*host_memory"):
        plan(2 * STATE, room=STATE // 2, offload="state")


def test_a_bound_is_that_of_plans_without_a_cap() -> None:
    free, found = plan(2 * STATE), plan(CAP)
    assert found.status == "gap_limit" and found.step_seconds > free.step_seconds
    assert found.step_seconds * (1 - found.gap) <= free.step_seconds * (1 + 1e-6)


def test_all_of_the_state_goes_there_if_it_is_asked_for() -> None:
    found = plan(2 * STATE, offload="state")
    assert len(found.program.on_host) == LAYERS and found.state_bytes == 0


def test_a_weight_is_fetched_for_each_call_that_reads_it_and_its_gradient_comes_back() -> None:
    graph, _ = traced(Deep(LAYERS), torch.randn(8, WIDTH))
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    names = [item.name for item in graph.inputs if item.spec.requires_grad]
    plain = Prices(graph, dims, cluster(host=UNIT), ROUGH)
    program = PricedProgram(plain, force_kinds(graph, dims, ["batch"])).hosting(names)
    layout, once = program.program.inputs[names[0]], 1.0 + LAYER
    of_each = [stream_seconds(program.prices, name, layout) for name in names]
    assert of_each[0] == (once, once)  # its input has no gradient, for which it would be read in backward
    assert set(of_each[1:]) == {(once, 2 * once)}
    assert wait_seconds(program) == (LAYERS * once, (2 * LAYERS - 1) * once)
    assert stream_seconds(plain, names[0], layout) == (0.0, 0.0)


def test_weights_come_ahead_as_far_as_the_cap_has_room_and_at_no_loss() -> None:
    words = {"offload": "state", "recompute": "none"}
    found = plan(2 * STATE, **words)
    assert set(found.program.ahead) == set(found.program.on_host)
    tight = plan(found.peak_bytes - 1, **words)
    assert len(tight.program.ahead) < LAYERS and tight.peak_bytes < found.peak_bytes
    assert tight.offload_seconds > found.offload_seconds and tight.step_seconds > found.step_seconds
    for each in (found, tight):
        assert 0.0 <= each.gap < 1.0 and sum(each.parts.as_dict().values()) - each.parts.hidden == (
            pytest.approx(each.step_seconds)
        )


def test_on_cpus_no_weight_comes_ahead() -> None:
    found = autopar.plan(
        Deep(LAYERS), ClusterSpec.local(1), (torch.randn(8, WIDTH),), measure=False, offload="state"
    )
    assert found.program.on_host and not found.program.ahead


class Unread(nn.Module):
    """A head that forward doesn't call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def test_a_weight_that_nothing_reads_is_not_fetched() -> None:
    plan = autopar.plan(
        Unread(), autopar.ClusterSpec.local(1), torch.randn(8, 16), measure=False, offload="state"
    )
    assert plan.state_bytes == 0 and "other_weight" in plan.program.on_host
