"""Stages on unlike groups: cuts follow the speed and the memory of the group that holds each."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import ClusterSpec, DescribedDevice, Link
from autopar.core.device_groups import DeviceGroup, GroupLink
from autopar.core.graph import Graph
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.planning.asked.request import Request
from autopar.planning.group_orders import hosts_of, orders_of
from autopar.planning.search import MeshDecision, decide, finish
from autopar.results.plan.plan import Plan
from autopar.trace.export import trace

WIDTH, LAYERS, PART = 512, 8, 256  # samples of a micro-batch
LITTLE, BIG = 24_000_000, 10**9  # bytes


def cluster_of(*speeds: float, memory: tuple[int, ...] = ()) -> ClusterSpec:
    """A node of devices that are known by their figures, each a group of its own."""
    kind = DescribedDevice((("fp32", 1e12),), 1e12)
    groups = [
        DeviceGroup(f"g{number}", "toy", speed=speed, memory=most, described=kind)
        for number, (speed, most) in enumerate(zip(speeds, memory or (BIG,) * len(speeds), strict=True))
    ]
    ties = [GroupLink((a.name, b.name), Link(1e-6, 1e12), same_node=True) for a, b in pairwise(groups)]
    return ClusterSpec.of_groups(groups, ties)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return trace(Deep(), (torch.rand(PART, WIDTH), torch.rand(PART, WIDTH))).graph


def decided(graph: Graph, cluster: ClusterSpec, ranks: int = 2) -> MeshDecision:
    asked = Request(measure=False, alternatives=False, pipeline_ranks=ranks, micro_batches=8)
    return decide(graph, cluster, asked)


def planned(graph: Graph, cluster: ClusterSpec) -> Plan:
    return finish(decided(graph, cluster)).plan


def layers_of(plan: Plan) -> list[int]:
    """Linear layers that each of the world's parts has."""
    found = [0] * plan.pipeline.ranks
    for number, layer in enumerate(plan.layers):
        stage = sum(start <= number for start in plan.pipeline.starts) - 1
        found[plan.pipeline.host(plan.pipeline.rank_of(stage))] += "linear" in layer.op
    return found


@pytest.mark.parametrize("speeds", [(1.0, 3.0), (3.0, 1.0)])
def test_a_group_has_as_many_layers_as_its_speed_says(graph: Graph, speeds: tuple[float, ...]) -> None:
    found = planned(graph, cluster_of(*speeds))
    assert layers_of(found) == [2 * int(speed) for speed in speeds]
    seconds = [stage.forward + stage.backward for stage in found.stages]
    assert max(seconds) < 1.25 * min(seconds)


@pytest.mark.parametrize(("memory", "hosts"), [((LITTLE, BIG), (1, 0)), ((BIG, LITTLE), ())])
def test_a_group_with_little_memory_has_what_fits_behind_those_with_more(
    graph: Graph, memory: tuple[int, int], hosts: tuple[int, ...]
) -> None:
    """The first stage keeps most micro-batches."""
    found = planned(graph, cluster_of(1.0, 1.0, memory=memory))
    large, small = found.stages
    assert found.pipeline.hosts == hosts
    assert [layers_of(found)[found.pipeline.host(rank)] for rank in range(2)] == [6, 2]
    assert small.nbytes <= LITTLE < large.nbytes and (found.peak_bytes, found.memory_cap) == (
        small.nbytes,
        LITTLE,
    )


def test_a_plan_says_which_rank_sets_the_pace(graph: Graph) -> None:
    (note,) = (note for note in planned(graph, cluster_of(1.0, 3.0)).notes if "sets the pace" in note)
    assert "of a step the pipeline's ranks work" in note and "g0" in note and "g1" in note


def test_kinds_hold_stages_that_follow_each_other() -> None:
    blocks = cluster_of(1.0, 2.0, 1.0, 4.0, memory=(1, 1, 1, 2)).blocks(4)
    same = (blocks[0], blocks[1], blocks[0], blocks[3])
    orders = list(orders_of(same))
    assert orders[0] == (0, 1, 2, 3) and len(orders) == 1 + 6
    assert all(abs(order.index(0) - order.index(2)) == 1 for order in orders[1:])
    assert all(hosts_of([same[host] for host in order], same) in (order, ()) for order in orders)


def test_a_pipeline_knows_what_holds_its_ranks() -> None:
    moved = Pipeline(3, 4, ScheduleKind.ONE_F_ONE_B, (0, 2, 5), hosts=(2, 0, 1))
    assert [moved.host(rank) for rank in range(3)] == [2, 0, 1]
    assert [moved.rank_on(moved.host(rank)) for rank in range(3)] == [0, 1, 2]
