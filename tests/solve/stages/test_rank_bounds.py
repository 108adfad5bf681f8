"""The bounds on whole ranks hold for every cut, and say more than those on stages."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations
from random import Random

import numpy as np
import pytest

from autopar.core.schedule import ScheduleKind
from autopar.cost.stages.intervals import Intervals
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.stages.cut_costs import CutProblem
from autopar.solve.stages.rank_bounds import Scarcity, pair_bound
from tests.solve.stages.test_cut_search import random_table, schedule_of

CLOSE = 1e-9
TURNING = [kind for kind in ScheduleKind if kind.is_v]
TWICE = [ScheduleKind.INTERLEAVED, *TURNING]


def paths(count: int, stages: int) -> np.ndarray:
    """All cuts of so many operators."""
    inner = combinations(range(1, count), stages - 1)
    return np.array([(0, *each, count) for each in inner])


@pytest.mark.parametrize("kind", TWICE)
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 40))]
)
def test_no_cut_is_faster(kind: ScheduleKind, seed: int) -> None:
    schedule, table = schedule_of(kind, 2, 4), random_table(Random(seed), 9)
    problem = CutProblem([table], schedule, None)
    best = float(problem.seconds(paths(9, schedule.stages)).min())
    assert pair_bound(problem, 2 * best) <= best * (1 + CLOSE)
    assert pair_bound(problem, best) >= problem.bound * (1 - CLOSE)
    assert pair_bound(problem, problem.bound / 2) == problem.bound / 2


@pytest.mark.parametrize("kind", TURNING)
def test_ranks_are_seen_as_a_whole(kind: ScheduleKind) -> None:
    """Of five equal operators one of two ranks gets three, though no stage needs more than two."""
    problem = CutProblem([table_of(5 * [1.0])], schedule_of(kind, 2, 4), None)
    best = float(problem.seconds(paths(5, 4)).min())
    assert best >= pair_bound(problem, 2 * best) > 0.999 * best > 1.15 * problem.bound


def table_of(seconds: list[float]) -> Intervals:
    """Operators that take so long forward, and for either gradient; nothing else takes time."""
    count = len(seconds)
    each = np.array([[sum(seconds[p:q]) for q in range(count + 1)] for p in range(count + 1)])
    none, void = np.zeros(count + 1), np.zeros_like(each)
    return replace(
        random_table(Random(0), count),
        send=none,
        send_back=none,
        forward=each,
        input_gradient=each,
        weight_gradient=each,
        sync=void,
        update=void,
        calling=0.0,
        splitting=0.0,
    )


def test_a_loop_waits_in_both_laps() -> None:
    """Sixteen equal operators on four ranks: a cut into eight equal stages has no better."""
    schedule = schedule_of(ScheduleKind.INTERLEAVED, 4, 8)
    problem = CutProblem([table_of(16 * [1.0])], schedule, None)
    even = float(problem.seconds(np.array([range(0, 17, 2)]))[0])
    assert even == 8 * 12.0 + 3 * 6.0
    busy = 8 * 12.0
    assert problem.bound < busy + 0.3 * (even - busy)
    assert even > pair_bound(problem, 2 * even) > busy + 0.4 * (even - busy)


def placed(weights: list[float], seconds: float, state: float, kept: float) -> Intervals:
    """A placement of which every operator takes its part by weight: of seconds forward, and for either
    gradient, and of bytes. Nothing else takes any."""
    table = table_of([seconds * each for each in weights])
    share, void, none = table.forward / seconds, np.zeros_like(table.forward), np.zeros(len(weights) + 1)
    same = dict.fromkeys(("gradients", "early", "working", "summing"), void)
    halves = {each.name: void for each in fields(table.halves)}
    return replace(
        table,
        state=state * share,
        saved=kept * share,
        batch=0.0,
        received=none,
        received_back=none,
        halves=replace(table.halves, **halves),
        **same,
    )


@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB1P, *TURNING])
@pytest.mark.parametrize("seed", range(4))
def test_what_memory_makes_dearer_bounds_every_placement_that_fits(kind: ScheduleKind, seed: int) -> None:
    random = Random(seed)
    schedule, weights = schedule_of(kind, 2, 4), [random.random() + 0.2 for _ in range(9)]
    placements = [(1.0, 3000.0, 30.0), (1.1, 1500.0, 60.0), (1.5, 600.0, 20.0)]
    tables = [placed(weights, *each) for each in placements]
    every = paths(9, schedule.stages)

    def least(memory_price: MemoryPrice) -> float:
        return min(
            sum(weights) * (3 * seconds + memory_price.state * state + memory_price.saved * kept)
            for seconds, state, kept in placements
        )

    for cap in (2_500, 4_000, 9_000, 10**9):
        found = [float(CutProblem([table], schedule, cap).seconds(every).min()) for table in tables]
        best = min(found)
        if not np.isfinite(best):
            continue
        slope = 4 * 3 * 0.1 / 1400.0
        scarcity = Scarcity(float(cap), least(FREE), [factor * slope for factor in (0.5, 1, 2, 4)], least)
        free = CutProblem(tables[:1], schedule, None)
        without, bound = pair_bound(free, 2 * best), pair_bound(free, 2 * best, scarcity)
        assert without <= bound <= best * (1 + CLOSE)
        if cap == 2_500:
            assert bound > 1.02 * without
        if cap == 10**9:
            assert bound == without
