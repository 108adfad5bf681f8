"""Lower bounds on the seconds of cuts that look at ranks with two stages as a whole.

Stage by stage says little there: a rank with a short stage may have a long one besides.

**Stages that turn round** at the last rank:

    places    0    a1    a2       ...       b2    b1    n        rank 0 has [0, a1) and [b1, n)
              |-0--|--1--|-- later ranks ---|--1--|-0--|         rank 1 has [a1, a2) and [b2, b1) ...

A rank takes at least

    h[a] + M t[a, a'] + M t[b', b] + updates

with h the least that stages before it take forward, t the seconds for which a stage keeps it busy for one
micro-batch; and it holds at least what both stages do at any one moment of the schedule. For a limit on the
seconds, and under the cap, the least b with which each a can be reached says all of a rank and those before
it: what is left in the middle should be short, as stages grow with what is in them. The ranks meet in the
middle or the limit is too low; bisection says where it is. Stages may be empty here, which costs nothing.

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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.core.schedule import Schedule, ScheduleKind
from autopar.cost.rectangles import Row, Table
from autopar.ilp.cut_problem import CutProblem
from autopar.ilp.flights import Counts, flights, stages_of
from autopar.ilp.linear_program import LinearProgram
from autopar.ilp.solver import solve

CLOSE = 2e-4  # of the seconds, to which the bound is sought
LAPS = 2
MOMENTS = 3  # of a rank, those with most micro-batches in flight


def pair_bound(problem: CutProblem, most: float) -> float:
    """Seconds that no cut takes less than, as far as `most`; those of the problem itself where ranks have one
    stage each."""
    low, high = problem.bound, most
    if low < high and problem.schedule.kind is ScheduleKind.INTERLEAVED:
        low = max(low, _looped(problem))
    if low >= high or not problem.schedule.kind.is_v:
        return min(low, high)
    pairs = _Pairs(problem)
    if not pairs.meet(high):
        return high
    while high - low > CLOSE * most:
        middle = (low + high) / 2
        low, high = (low, middle) if pairs.meet(middle) else (middle, high)
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
class _Demand:
    """What a rank's two stages take of something of which it has a `limit`, None for seconds."""

    first: Table  # 0 of stages that are empty
    second: Table  # the same, growing with the stage; negative, so that columns are sorted
    limit: float | None


@dataclass(frozen=True)
class _Pairs:
    problem: CutProblem

    @cached_property
    def demands(self) -> list[list[_Demand]]:
        """Of each rank."""
        return [list(self.of_rank(rank)) for rank in range(self.problem.schedule.ranks)]

    def meet(self, seconds: float) -> bool:
        """Whether the ranks can share the graph if each may take so many seconds."""
        count = len(self.problem.table.places)
        least = np.full(count, count)
        least[0] = count - 1
        for demands in self.demands:
            further = np.full(count, count)
            for place in np.flatnonzero(least < count).tolist():
                np.minimum(further, _onward(demands, place, int(least[place]), seconds), out=further)
            least = further
        return bool((least == np.arange(count)).any())

    def of_rank(self, rank: int) -> Iterator[_Demand]:
        problem = self.problem
        one, two = stages_of(problem.schedule, rank)
        work = [
            problem.schedule.micro_batches * problem.busy[stage]
            + problem.table.update
            + problem.allowed[stage]
            for stage in (one, two)
        ]
        yield _demand(work[0] + problem.ahead[one][:, None], work[1], None)
        if problem.cap is None:
            return
        flight = flights(problem.schedule)[rank]
        moments = sorted({*flight.later, *flight.later_half}, key=lambda each: sum(each[:4]))
        for counts in moments[-MOMENTS:]:
            first, second = (self.held(stage, counts, place) for place, stage in enumerate((one, two)))
            yield _demand(first, second, float(problem.cap))

    def held(self, stage: int, counts: Counts, place: int) -> Table:
        """What one of a rank's stages holds at a moment; of two operators' working bytes, of which the larger
        are there, half."""
        problem, (now, half, back) = self.problem, counts[place::2]
        kept, received = problem.kept[stage], problem.table.received_back[:, None]
        inside = now * kept + half * problem.table.halves.held + back * received
        return problem.lasting[stage] + inside + problem.working[stage] / 2


def _demand(first: Table, second: Table, limit: float | None) -> _Demand:
    return _Demand(np.triu(first, 1), -_growing(second), limit)


def _growing(table: Table) -> Table:
    """The table, or less, so that no stage has less than one that lies in it."""
    void = np.tril(np.full_like(table, np.inf))
    least = np.minimum.accumulate(table + void, axis=0)  # over stages that begin earlier
    return np.triu(np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1], 1)  # ... or end later


def _onward(demands: list[_Demand], place: int, end: int, seconds: float) -> NDArray[np.intp]:
    """For each place up to which a rank's first stage, from `place` on, may go, the least one at which its
    second, up to `end`, may begin; beyond all places where there is none."""
    count = len(demands[0].first)
    least = np.arange(count)
    for each in demands:
        budget: Row = (seconds if each.limit is None else each.limit) - each.first[place]
        least = np.maximum(least, np.searchsorted(each.second[: end + 1, end], -budget))
    least[:place] = count
    return np.where(least <= end, least, count)
