"""Lower bounds on the seconds of cuts that look at ranks with two stages as a whole.

Stage by stage says little there: a rank with a short stage may have a long one besides.

**Stages that turn round** at the last rank:

    places    0    a1    a2       ...       b2    b1    n        rank 0 has [0, a1) and [b1, n)
              |-0--|--1--|-- later ranks ---|--1--|-0--|         rank 1 has [a1, a2) and [b2, b1) ...

A rank takes at least

    h[a] + M t[a, a'] + M t[b', b] + updates

with h the least that stages before it take forward, t the seconds for which a stage keeps it busy for one
micro-batch. For a limit on the seconds the least b with which each a can be reached says all of a rank and
those before it: what is left in the middle should be short, as stages grow with what is in them. The ranks
meet in the middle or the limit is too low; bisection says where it is. Stages may be empty here, which costs
nothing. Memory is as if it had no end.

**Stages in a loop**, K ranks, backward whole. Let x_r and y_r be the seconds of a micro-batch in the first
and in the second stage of rank r, forward and backward. With all its work a rank waits until the first
micro-batch comes, and ends when the last one's gradient has gone the way back to the first stage; and so with
what it does from its first action for y_r to its last, before and after which come at most n others for x_r:

    L >= sum x_s (s < r) + M (x_r + y_r)
    L >= sum x_s + sum y_s (s < r) + M (x_r + y_r) - n x_r

A linear program says how small L can be if operators could be parted at will: each counts as the least by
which a stage grows with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.core.schedule import Schedule, ScheduleKind
from autopar.cost.rectangles import Table
from autopar.ilp.cut_problem import CutProblem
from autopar.ilp.flights import stages_of
from autopar.ilp.linear_program import LinearProgram
from autopar.ilp.solver import solve

CLOSE = 2e-4  # of the seconds, to which the bound is sought
LAPS = 2


def pair_bound(problem: CutProblem, most: float) -> float:
    """Seconds that no cut takes less than, as far as `most`, had it no cap; those of the problem itself where
    ranks have one stage each."""
    low, high = problem.bound, most
    if low < high and problem.schedule.kind is ScheduleKind.INTERLEAVED:
        low = max(low, _looped(problem))
    if low >= high or not problem.schedule.kind.is_v:
        return min(low, high)
    ranks = _ranks(problem)
    if not _meet(ranks, high):
        return high
    while high - low > CLOSE * most:
        middle = (low + high) / 2
        low, high = (low, middle) if _meet(ranks, middle) else (middle, high)
    return low


def _looped(problem: CutProblem) -> float:
    """The linear program's answer; -inf for more than two stages a rank."""
    schedule, growth = problem.schedule, _growth(problem)
    if schedule.stages_per_rank != LAPS:
        return -math.inf
    ranks, count = schedule.ranks, schedule.micro_batches
    lp = LinearProgram()
    laps = [[lp.variable() for _ in range(ranks)] for _ in range(LAPS)]
    longest = lp.variable(1.0)
    lp.equal(((1.0, each) for lap in laps for each in lap), growth)
    for rank in range(ranks):
        first, second = laps[0][rank], laps[1][rank]
        work = [(-1.0, longest), (float(count), first), (float(count), second)]
        before = [(1.0, each) for each in laps[0][:rank]]
        lp.at_most((*work, *before), 0.0)
        before = [(1.0, each) for each in (*laps[0], *laps[1][:rank])]
        lp.at_most((*work, *before, (-float(_outside(schedule, rank)), first)), 0.0)
    return solve(lp, relaxed=True).bound


def _growth(problem: CutProblem) -> float:
    """Seconds of one micro-batch by the least that each operator adds to a stage."""
    least = np.minimum.reduce(problem.busy)
    added = np.diff(least, axis=1) + np.tril(np.full((len(least), len(least) - 1), np.inf), -1)
    return float(added.min(axis=0).clip(min=0.0).sum())


def _outside(schedule: Schedule, rank: int) -> int:
    """How many actions a rank does for its first stage before all those for its second, or after them."""
    later = [action.stage >= schedule.ranks for action in schedule.actions(rank)]
    return max(later.index(True), later[::-1].index(True))


@dataclass(frozen=True)
class _Rank:
    """The seconds that a rank's two stages take, those of the second negative, so that columns are sorted."""

    first: Table  # 0 of stages that are empty
    second: Table  # growing with the stage

    def onward(self, place: int, end: int, seconds: float) -> NDArray[np.intp]:
        """For each place up to which the first stage, from `place` on, may go, the least one at which the
        second, up to `end`, may begin; beyond all places where there is none."""
        count = len(self.first)
        least = np.searchsorted(self.second[: end + 1, end], self.first[place] - seconds)
        least = np.maximum(least, np.arange(count))
        least[:place] = count
        return np.where(least <= end, least, count)


def _ranks(problem: CutProblem) -> list[_Rank]:
    schedule, update = problem.schedule, problem.table.update
    found = []
    for one, two in (stages_of(schedule, rank) for rank in range(schedule.ranks)):
        first, second = (schedule.micro_batches * problem.busy[stage] + update for stage in (one, two))
        found.append(_Rank(np.triu(first + problem.ahead[one][:, None], 1), -_growing(second)))
    return found


def _meet(ranks: list[_Rank], seconds: float) -> bool:
    """Whether the ranks can share the graph if each may take so many seconds."""
    count = len(ranks[0].first)
    least = np.full(count, count)
    least[0] = count - 1
    for rank in ranks:
        further = np.full(count, count)
        for place in np.flatnonzero(least < count).tolist():
            np.minimum(further, rank.onward(place, int(least[place]), seconds), out=further)
        least = further
    return bool((least == np.arange(count)).any())


def _growing(table: Table) -> Table:
    """The table, or less, so that no stage has less than one that lies in it."""
    void = np.tril(np.full_like(table, np.inf))
    least = np.minimum.accumulate(table + void, axis=0)  # over stages that begin earlier
    return np.triu(np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1], 1)  # ... or end later
