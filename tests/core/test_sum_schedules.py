"""Every algorithm delivers the sum to every rank: its messages, simulated with numbers."""

from __future__ import annotations

import math

import pytest

from autopar.core.sum_schedules import (
    SumAlgorithm,
    SumSchedule,
    grid,
    halving_doubling,
    nested_rings,
    schedule_of,
    shifted,
)
from autopar.core.topology import Topology, TopologyKind
from tests.cost.topology.topologies import every

SIZES = range(2, 10)


def run(schedule: SumSchedule, ranks: int, steps: int | None = None) -> list[list[int]]:
    """What each rank holds after some steps. Rank r began with (part + 1) * 1000**r of each part: any sum of
    those says who is in it, and how often."""
    held = [[(part + 1) * 1000**rank for part in range(schedule.parts)] for rank in range(ranks)]
    for step in schedule.steps[:steps]:
        before = [list(values) for values in held]
        assert len({(sender, receiver) for sender, receiver, _ in step.traffic}) == len(step.traffic)
        for sender, receiver, count in step.traffic:
            parts = list(step.parts_of(sender, receiver))
            assert sender != receiver and len(set(parts)) == len(parts) == count
            for part in parts:
                held[receiver][part] = before[sender][part] + (held[receiver][part] if step.adds else 0)
    return held


def wanted(schedule: SumSchedule, ranks: int) -> list[int]:
    return [(part + 1) * sum(1000**rank for rank in range(ranks)) for part in range(schedule.parts)]


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("algorithm", SumAlgorithm)
def test_every_rank_ends_with_the_sum_on_every_topology(algorithm: SumAlgorithm, ranks: int) -> None:
    delivered = 0
    for topology in every(ranks):
        schedule = schedule_of(algorithm, ranks, topology)
        if schedule is None:
            assert algorithm is SumAlgorithm.HIERARCHICAL and len(grid(ranks, topology)) == 1
            continue
        assert run(schedule, ranks) == [wanted(schedule, ranks)] * ranks
        delivered += 1
    assert delivered or ranks in (2, 3, 5, 7)  # a prime number of ranks has no groups


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("algorithm", SumAlgorithm)
def test_after_its_first_half_a_rank_has_the_sum_of_its_own_part(algorithm: SumAlgorithm, ranks: int) -> None:
    schedule = schedule_of(algorithm, ranks)
    if schedule is None or not schedule.scattered:
        assert algorithm in (SumAlgorithm.TREE, SumAlgorithm.HALVING, SumAlgorithm.HIERARCHICAL)
        return
    held, sums = run(schedule, ranks, schedule.scattered), wanted(schedule, ranks)
    assert [held[rank][rank] for rank in range(ranks)] == sums


def test_a_slip_in_what_is_sent_is_seen() -> None:
    good = shifted(5)
    short = SumSchedule(good.parts, good.steps[:-1], good.scattered)
    assert run(short, 5) != [wanted(short, 5)] * 5
    twice = SumSchedule(good.parts, (good.steps[0], *good.steps), good.scattered)
    assert run(twice, 5) != [wanted(twice, 5)] * 5


@pytest.mark.parametrize("ranks", SIZES)
def test_a_rank_sends_as_many_parts_as_the_formulas_say(ranks: int) -> None:
    """A ring, shifts, and halving among a power of two send 2 (P - 1)/P n from each rank."""

    def sent(schedule: SumSchedule) -> list[int]:
        counts = [0] * ranks
        for step in schedule.steps:
            for sender, _, count in step.traffic:
                counts[sender] += count
        return counts

    for schedule in (nested_rings((ranks,)), shifted(ranks), nested_rings(grid(ranks, None))):
        assert sent(schedule) == [2 * (ranks - 1)] * ranks and schedule.parts == ranks
    assert len(nested_rings((ranks,)).steps) == 2 * (ranks - 1)
    assert len(shifted(ranks).steps) == 2 * math.ceil(math.log2(ranks))
    if ranks.bit_count() == 1:
        assert sent(halving_doubling(ranks)) == [2 * (ranks - 1)] * ranks


def test_groups_are_those_of_the_topology() -> None:
    torus = Topology(TopologyKind.TORUS, 12, sizes=(3, 4))
    assert grid(12, torus) == (4, 3) and grid(12, None) == (3, 4) and grid(6, torus) == (2, 3)
    assert grid(12, Topology(TopologyKind.FAT_TREE, 12, sizes=(2, 6))) == (2, 6)
    assert grid(7, None) == (7,)
