"""The bounds on whole ranks hold for every cut, and say more than those on stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import numpy as np
import pytest

from autopar.core.schedule import ScheduleKind
from autopar.ilp.cut_problem import CutProblem
from autopar.ilp.pairs import pair_bound
from tests.ilp.test_stages import random_table, schedule_of

CLOSE = 1e-9
TURNING = [kind for kind in ScheduleKind if kind.is_v]
TWICE = [ScheduleKind.INTERLEAVED, *TURNING]


def paths(count: int, stages: int) -> np.ndarray:
    """All cuts of so many operators."""
    inner = combinations(range(1, count), stages - 1)
    return np.array([(0, *each, count) for each in inner])


@pytest.mark.parametrize("kind", TWICE)
@pytest.mark.parametrize("share", [1.0, 0.25, 0.05])
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 40))]
)
def test_no_cut_that_fits_is_faster(kind: ScheduleKind, share: float, seed: int) -> None:
    schedule, table = schedule_of(kind, 2, 4), random_table(Random(seed), 9)
    every, roomy = paths(9, schedule.stages), CutProblem([table], schedule, None)
    peaks = np.sort(roomy.rank_bytes(every).max(axis=1))
    problem = CutProblem([table], schedule, int(peaks[int(share * (len(peaks) - 1))]))
    best = float(problem.seconds(every).min())
    assert pair_bound(problem, 2 * best) <= best * (1 + CLOSE)
    assert pair_bound(problem, best) >= problem.bound * (1 - CLOSE)
    assert pair_bound(problem, problem.bound / 2) == problem.bound / 2


@pytest.mark.parametrize("kind", TURNING)
def test_ranks_are_seen_as_a_whole(kind: ScheduleKind) -> None:
    """Memory lets few ranks have two stages that even each other out."""
    schedule, gained = schedule_of(kind, 2, 4), []
    for seed in range(12):
        table = random_table(Random(seed), 9)
        peaks = np.sort(CutProblem([table], schedule, None).rank_bytes(paths(9, 4)).max(axis=1))
        problem = CutProblem([table], schedule, int(peaks[1]))
        gained.append(pair_bound(problem, 3 * problem.bound) / problem.bound)
    assert max(gained) > 1.05


def test_a_loop_waits_in_both_laps() -> None:
    """Sixteen equal operators on four ranks: a cut into eight equal stages has no better."""
    schedule = schedule_of(ScheduleKind.INTERLEAVED, 4, 8)
    table = replace(random_table(Random(0), 16), send=np.zeros(17), send_back=np.zeros(17), calling=0.0)
    each = np.array([[float(max(0, q - p)) for q in range(17)] for p in range(17)])
    void = np.zeros_like(each)
    table = replace(
        table, forward=each, input_gradient=each, weight_gradient=each, sync=void, update=void, splitting=0.0
    )
    problem = CutProblem([table], schedule, None)
    even = float(problem.seconds(np.array([range(0, 17, 2)]))[0])
    assert even == 8 * 12.0 + 3 * 6.0
    busy = 8 * 12.0
    assert problem.bound < busy + 0.3 * (even - busy)
    assert even > pair_bound(problem, 2 * even) > busy + 0.4 * (even - busy)
