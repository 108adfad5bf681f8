"""Rows for unlike devices: in proportion to what each does, priced on the rank that takes longest."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar.ops  # noqa: F401  (registers every family)
from autopar.cluster import ClusterSpec, DescribedDevice, Link
from autopar.core.costs import DeviceModel
from autopar.core.device_groups import DeviceGroup, GroupLink
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.placement import Shard
from autopar.core.strategy import Strategy
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel, GroupPace
from autopar.cost.operators.prices import Prices
from autopar.errors import InfeasibleError, InputError
from autopar.planning.asked.request import Request
from autopar.planning.search import search
from autopar.planning.shares import by_speed, seconds_of, shared
from autopar.sharding.strategies import dims_of, strategies_of
from autopar.trace.export import trace

FAST = Link(1e-6, 1e12)
TOY = DeviceModel("toy", "cpu", tuple((dtype, 1e9) for dtype in (torch.float32, torch.float64)), 1e9, 0.0)


def cluster_of(*speeds: float, memory: tuple[int | None, ...] = ()) -> ClusterSpec:
    """A node of CPUs, each a group of its own."""
    memories = memory or (None,) * len(speeds)
    groups = [
        DeviceGroup(f"g{number}", "cpu", speed=speed, memory=most)
        for number, (speed, most) in enumerate(zip(speeds, memories, strict=True))
    ]
    ties = [GroupLink((a.name, b.name), FAST, same_node=True) for a, b in pairwise(groups)]
    return ClusterSpec.of_groups(groups, ties)


def model_of(cluster: ClusterSpec) -> CostModel:
    """A toy's estimates; each group does its part of them."""
    paces = tuple(GroupPace(group.speed, None) for group in cluster.groups)
    return CostModel(TOY, {}, CollectiveTable({}), paces=paces)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.body(x), y)


def net(batch: int = 24) -> Graph:
    with torch.device("meta"):
        return trace(Net(), (torch.rand(batch, 64), torch.rand(batch, 64))).graph


def by_samples(graph: Graph, prices: Prices) -> list[Strategy]:
    """The strategy of each operator that splits its first result's samples on all axes."""
    found = []
    for item in graph.operators:
        offered = strategies_of(item, prices.dims)
        rows = [each for each in offered if all(option.operands[0] == Shard(0) for option in each)]
        found.append(rows[0])
    return found


# -- shares -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_shares_are_the_speeds(speeds: list[int]) -> None:
    cluster = cluster_of(*map(float, speeds), 10.0)
    mesh = shared(Mesh((len(speeds) + 1,)), cluster, [*map(float, speeds), 10.0])
    shares = mesh.shares_of(0)
    assert [share / shares[-1] for share in shares[:-1]] == pytest.approx(
        [speed / 10 for speed in speeds], rel=1 / 240
    )


def test_ranks_of_an_axis_are_as_fast_as_the_slowest_of_their_rows() -> None:
    cluster = cluster_of(1.0, 1.0, 2.0, 2.0)
    assert str(shared(Mesh((2, 2)), cluster, [1, 1, 2, 2])) == "1:2x2"
    assert str(shared(Mesh((2, 2)), cluster, [1, 2, 1, 2])) == "2x1:2"
    assert str(shared(Mesh((2, 2)), cluster, [1, 2, 3, 6])) == "1:3x1:2"
    assert shared(Mesh((2, 2)), cluster, [1, 2, 2, 1]) == Mesh((2, 2))  # a slow one in each row
    assert str(shared(Mesh((4,)), cluster, [1, 1, 2, 2])) == "1*2:2*2"


def test_speeds_come_from_the_seconds_of_even_parts() -> None:
    graph, cluster = net(), cluster_of(1.0, 0.5, 4.0)
    first, half, four = seconds_of(graph, cluster, model_of(cluster), training=True)
    assert half == pytest.approx(2 * first) and four == pytest.approx(first / 4)


def test_a_like_cluster_takes_the_meshes_as_they_are() -> None:
    meshes, like = [Mesh((4,)), Mesh((2, 2))], ClusterSpec(devices_per_node=4)
    model = CostModel(TOY, {}, CollectiveTable({}))
    assert by_speed(meshes, net(), like, model, Request()) == meshes


@pytest.mark.parametrize("asked", ["1:2", "2"])
def test_a_mesh_that_is_asked_for_is_taken_as_asked(asked: str) -> None:
    cluster, mesh = cluster_of(1.0, 3.0), Mesh.parse(asked)
    assert by_speed([mesh], net(), cluster, model_of(cluster), Request(mesh=mesh)) == [mesh]


def test_the_even_mesh_stays_a_choice() -> None:
    cluster = cluster_of(1.0, 3.0)
    found = by_speed([Mesh((2,))], net(), cluster, model_of(cluster), Request())
    assert found == [Mesh.parse("1:3"), Mesh((2,))]


# -- prices -----------------------------------------------------------------------------------------------


def prices_on(mesh: Mesh, *speeds: float, batch: int = 24) -> tuple[Graph, Prices]:
    graph, cluster = net(batch), cluster_of(*speeds)
    return graph, Prices(graph, dims_of(graph, mesh), cluster, model_of(cluster))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(1.0, 2.0), (1.0, 3.0, 5.0), (2.0, 1.0), (1.0, 0.5)]), st.data())
def test_a_price_is_that_of_the_rank_that_takes_longest(
    speeds: tuple[float, ...], data: st.DataObject
) -> None:
    """Against each rank by itself: its part, on a cluster that has one such device."""
    shares = data.draw(st.tuples(*(st.integers(1, 4) for _ in speeds)))
    mesh = Mesh((len(speeds),), (shares,))
    graph, prices = prices_on(mesh, *speeds)
    like = ClusterSpec(devices_per_node=len(speeds), intra=FAST)
    for item, strategy in zip(graph.operators, by_samples(graph, prices), strict=True):
        alone = []
        for rank, speed in enumerate(speeds):
            model = replace(CostModel(TOY, {}, CollectiveTable({})), contention=1 / speed)
            dims = prices.dims.seen_by([mesh.coordinate(rank)])
            alone.append(Prices(graph, dims, like, model).plain(item, strategy).compute)
        assert prices.plain(item, strategy).compute == pytest.approx(max(alone))


def test_rows_by_speed_take_as_long_everywhere_and_less_than_even_ones() -> None:
    """Of 24 rows 6, 6 and 12 on speeds 1, 1 and 2 take each 6; of even ones the slow take 8."""
    speeds = (1.0, 1.0, 2.0)
    graph, even = prices_on(Mesh((3,)), *speeds)
    _, fit = prices_on(Mesh.parse("1*2:2"), *speeds)
    item = graph.operators[1]
    before, after = (each.plain(item, by_samples(graph, each)[1]).compute for each in (even, fit))
    assert after / before == pytest.approx(6 / 8)


def test_an_update_is_that_of_the_slowest_device() -> None:
    graph, prices = prices_on(Mesh((2,)), 1.0, 0.25)
    plain = Prices(
        graph, prices.dims, ClusterSpec(devices_per_node=2), CostModel(TOY, {}, CollectiveTable({}))
    )
    name, layout = graph.inputs[0].name, (Shard(0),)
    assert prices.update(name, layout) == pytest.approx(4 * plain.update(name, layout)) and prices.update(
        name, layout
    )


# -- plans ------------------------------------------------------------------------------------------------


def planned(cluster: ClusterSpec, graph: Graph) -> tuple[Mesh, tuple[str, ...], float]:
    found = search(graph, cluster, Request(measure=False, alternatives=False)).plan
    return found.mesh, found.notes, found.step_seconds


def test_a_plan_for_unlike_devices_cuts_rows_by_speed_and_says_who_sets_the_pace() -> None:
    graph = net(3072)
    mesh, notes, seconds = planned(cluster_of(1.0, 0.5), graph)
    assert str(mesh) == "2:1"
    assert any(note.startswith(("g0 sets the pace", "g1 sets the pace")) for note in notes)
    _, _, like = planned(cluster_of(0.5, 0.5), graph)
    assert seconds < 0.85 * like  # 3/2 of the work of two slow ones


def test_memory_of_the_smallest_group_is_named_where_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match=r"without group g1, whose 20 kB a device"):
        planned(cluster_of(1.0, 0.5, memory=(10**9, 20_000)), net(64))


def test_a_kind_that_nobody_measured_is_estimated_and_marked() -> None:
    figures = DescribedDevice((("fp32", 8e12),), 3e11)
    groups = [DeviceGroup("new", "h100"), DeviceGroup("old", "t4", described=figures)]
    cluster = ClusterSpec.of_groups(groups, [GroupLink(("new", "old"), FAST, same_node=True)])
    mesh, notes, _ = planned(cluster, net(30_000))
    shares = mesh.shares_of(0)
    assert shares[0] > shares[1]
    assert "old: nothing of t4 is measured, its seconds are estimates" in notes
    unknown = replace(cluster, groups=(groups[0], DeviceGroup("old", "t4")))
    with pytest.raises(InputError, match=r"group old: cluster.device.*'t4'.*flops and bandwidth"):
        planned(unknown, net())
