"""Prices of collectives, by hand: latency 1 s, 1 byte/s."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.costs import Collective
from autopar.cost.machine.collectives import CollectiveTable, seconds
from costdb.measurement import CollectiveMeasurement

AR, AG, RS, A2A, SR = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    Collective.SEND_RECV,
)


@dataclass(frozen=True)
class Link:
    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


UNIT = Link(1.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "size", "wanted"),
    [
        (AR, 4, 2 * 3 + 2 * 3 / 4 * 16),  # 30
        (AG, 4, 3 + 3 / 4 * 16),  # 15
        (RS, 4, 3 + 3 / 4 * 16),
        (A2A, 4, 3 + 3 / 4 * 4),  # a rank holds 4 of the 16 bytes: 6
        (SR, 4, 1 + 16),
        (AR, 2, 2 + 16),
        (AG, 2, 1 + 8),
        (A2A, 2, 1 + 4),
    ],
)
def test_sixteen_bytes_take(kind: Collective, size: int, wanted: float) -> None:
    assert seconds(kind, 16, size, UNIT) == wanted


@pytest.mark.parametrize("kind", Collective)
def test_one_rank_pays_nothing(kind: Collective) -> None:
    assert seconds(kind, 16, 1, UNIT) == 0


def test_latency_and_bandwidth_are_apart() -> None:
    assert seconds(AG, 16, 2, Link(3.0, 4.0)) == 3 + 8 / 4


def measured(nbytes: int, took: float, *, backend: str = "gloo", nodes: int = 1) -> CollectiveMeasurement:
    return CollectiveMeasurement(
        AG, backend, size=2, nodes=nodes, nbytes=nbytes, seconds=took, runs=5, spread=0.0
    )


TABLE = CollectiveTable.of([measured(100, 40.0), measured(1, 10.0), measured(1, 1.0, backend="nccl")], "gloo")


@pytest.mark.parametrize(
    ("nbytes", "wanted", "is_measured"),
    [
        (1, 10.0, True),
        (10, 20.0, True),  # halfway in logarithms: sqrt(10 * 40)
        (100, 40.0, True),
        (400, 160.0, False),
    ],
)
def test_measured_points_are_joined_in_logarithms(nbytes: int, wanted: float, is_measured: bool) -> None:
    cost = TABLE.cost(AG, nbytes, 2, UNIT)
    assert cost.seconds == pytest.approx(wanted)
    assert cost.measured is is_measured


def test_what_is_not_measured_is_the_closed_form_and_marked() -> None:
    for kind, size, nodes in ((AR, 2, 1), (AG, 3, 1), (AG, 2, 2)):
        cost = TABLE.cost(kind, 10, size, UNIT, nodes=nodes)
        assert cost.seconds == seconds(kind, 10, size, UNIT)
        assert not cost.measured


def test_below_the_smallest_point_the_latency_rules() -> None:
    table = CollectiveTable.of([measured(8, 5.0)], "gloo")
    assert table.cost(AG, 4, 2, UNIT).seconds == 5.0
    assert not table.cost(AG, 4, 2, UNIT).measured


@given(st.dictionaries(st.integers(1, 10**9), st.floats(1e-6, 10), min_size=1), st.integers(1, 10**10))
def test_interpolation_stays_between_its_points(points: dict[int, float], nbytes: int) -> None:
    table = CollectiveTable.of([measured(size, took) for size, took in points.items()], "gloo")
    cost = table.cost(AG, nbytes, 2, UNIT)
    if cost.measured:
        assert min(points.values()) * 0.999 <= cost.seconds <= max(points.values()) * 1.001
    else:
        assert not min(points) <= nbytes <= max(points)


def test_no_message_takes_longer_than_a_larger_one() -> None:
    table = CollectiveTable.of([measured(1, 9.0), measured(10, 2.0), measured(100, 4.0)], "gloo")
    assert [table.cost(AG, nbytes, 2, UNIT).seconds for nbytes in (1, 10, 100)] == [2.0, 2.0, 4.0]
