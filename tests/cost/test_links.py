"""Collectives are measured as programs call them, for every group that a mesh has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from autopar.cluster import ClusterSpec
from autopar.core.costs import Collective
from autopar.cost import links
from costdb.measurement import CollectiveMeasurement
from tests.pool import Pool

TIMEOUT = timedelta(seconds=60)


def _measure(size: int) -> list[CollectiveMeasurement]:
    return links.measure([(size, kind, 4096) for kind in Collective], TIMEOUT)


def test_groups_of_every_axis_and_pair_of_axes_are_wanted() -> None:
    assert {size for size, _, _ in links.wanted(ClusterSpec.local(4))} == {2, 4}
    assert links.wanted(ClusterSpec.local(1)) == []


@pytest.mark.parametrize(("world", "size"), [(3, 3), (4, 2)])
def test_every_kind_is_measured_in_the_world_and_in_its_parts(
    world: int, size: int, pools: Callable[[int], Pool]
) -> None:
    ranks = pools(world).run(_measure, size)
    assert [item.kind for item in ranks[0]] == list(Collective)
    for rank in ranks:
        assert [(item.size, item.nodes, item.backend) for item in rank] == [(size, 1, "gloo")] * len(rank)
