"""Collectives are measured as programs call them, for every group that a mesh has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import Collective
from autopar.cost.machine import measure_collectives
from costdb.measurement import CollectiveMeasurement
from tests.pool import Pool

TIMEOUT = timedelta(seconds=60)
LINK = Link(latency=1.0, bandwidth=1.0)


def two_nodes_of(count: int) -> ClusterSpec:
    return ClusterSpec(nodes=2, devices_per_node=count, inter=LINK)


def _measure(cluster: ClusterSpec, size: int) -> list[CollectiveMeasurement]:
    wanted = measure_collectives.wanted(cluster, [4096])
    return measure_collectives.measure([point for point in wanted if point[0].size == size], TIMEOUT)


def test_groups_of_every_axis_and_pair_of_axes_are_wanted() -> None:
    assert [(span.size, span.nodes) for span in measure_collectives.spans(ClusterSpec.local(4))] == [
        (2, 1),
        (4, 1),
    ]
    assert measure_collectives.wanted(ClusterSpec.local(1)) == []


def test_groups_are_told_apart_by_the_nodes_that_they_span() -> None:
    found = measure_collectives.spans(two_nodes_of(2))
    assert [(span.size, span.nodes) for span in found] == [(2, 1), (2, 2), (4, 2)]
    assert [span.copies for span in measure_collectives.spans(two_nodes_of(1))] == [1]
    four = ClusterSpec(nodes=4, devices_per_node=1, inter=LINK)
    assert [(span.size, span.nodes, span.copies) for span in measure_collectives.spans(four)] == [
        (2, 2, 2),
        (4, 4, 1),
    ]


@pytest.mark.parametrize(("world", "size"), [pytest.param(3, 3, marks=pytest.mark.long), (4, 2)])
def test_every_kind_is_measured_in_the_world_and_in_its_parts(
    world: int, size: int, pools: Callable[[int], Pool]
) -> None:
    ranks = pools(world).run(_measure, ClusterSpec.local(world), size)
    assert [item.kind for item in ranks[0]] == list(Collective)
    for rank in ranks:
        assert [(item.size, item.nodes, item.backend) for item in rank] == [(size, 1, "gloo")] * len(rank)


def test_copies_of_a_stage_are_measured_at_once(pools: Callable[[int], Pool]) -> None:
    """Pairs of four hosts are those of two stages: there is no mesh of all four with such an axis."""
    four = ClusterSpec(nodes=4, devices_per_node=1, inter=LINK)
    for rank in pools(4).run(_measure, four, 2):
        assert [(item.kind, item.nodes) for item in rank] == [(kind, 2) for kind in Collective]
