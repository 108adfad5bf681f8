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
nothing.

**Memory** that is scarce gives the same with a price for it (Lagrange). A rank's bytes are at most the cap,
so for each price, seconds per byte,

    L  >=  h + M t + updates + price (state + c kept) - price cap

with c the micro-batches that a stage keeps at the moment when the rank keeps most. What a stage takes with
its bytes at these prices is at least its part of what all operators together take so on any assignment
(memory_frontier.py): that is more than its part of their seconds alone.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.core.schedule import Schedule, ScheduleKind
from autopar.cost.interval_table import Table
from autopar.schedules.in_flight import Counts, flights, stages_of
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.highs import solve
from autopar.solve.linear_program import LinearProgram
from autopar.solve.stages.cut_costs import CutProblem, bottleneck

RANK_BOUND_TOLERANCE = 2e-4  # of the seconds, to which the bound is sought
LAPS = 2
KNOTS = (
    4  # counts of micro-batches for which a price is looked up; between them it grows no slower than a line
)


@dataclass(frozen=True, slots=True)
class Scarcity:
    """Lower bounds on stages' seconds under a `cap` of bytes per device: `least` are seconds of a micro-batch
    and priced bytes that no assignment takes less than, `free` where bytes cost nothing; `prices` of a byte,
    in seconds of a step, are those that are tried."""

    cap: float
    free: float
    prices: Sequence[float]
    least: Callable[[MemoryPrice], float]

    def surcharge(self, price: float, micro_batches: int, counts: Sequence[int]) -> dict[int, float]:
        """Factors by which a stage takes longer than without a price, by its micro-batches in flight."""
        each, most = price / micro_batches, max(counts)
        knots = np.unique(np.round(np.geomspace(max(1, min(counts)), max(1, most), KNOTS)))
        known = [self.least(MemoryPrice(state=each, saved=each * count)) / self.free for count in knots]
        return {count: float(np.interp(count, knots, known)) if count else 1.0 for count in set(counts)}


def pair_bound(problem: CutProblem, most: float, scarcity: Scarcity | None = None) -> float:
    """Seconds that no cut takes less than, as far as `most`, had it no cap but for what `scarcity` says."""
    low, high = problem.bound, most
    if low < high and problem.schedule.kind is ScheduleKind.INTERLEAVED:
        low = max(low, _looped(problem))
    if low < high and scarcity and problem.schedule.stages_per_rank == 1:
        low = max(low, _alone(problem, scarcity))
    if low >= high or not problem.schedule.kind.is_v:
        return min(low, high)
    ranks = _ranks(problem, scarcity)
    if not _meet(ranks, high):
        return high
    while high - low > RANK_BOUND_TOLERANCE * most:
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
    """The seconds that a rank's two stages take, those of the second negative, so that columns are sorted;
    with bytes that have a price, of which all the cap's are worth `room`."""

    first: Table  # 0 of stages that are empty
    second: Table  # growing with the stage
    room: float

    def onward(self, place: int, end: int, seconds: float) -> NDArray[np.intp]:
        """For each end of the first stage, which begins at `place`, the least begin of the second one. The
        second goes up to `end`; beyond all places where there is none."""
        count = len(self.first)
        least = np.searchsorted(self.second[: end + 1, end], self.first[place] - (seconds + self.room))
        least = np.maximum(least, np.arange(count))
        least[:place] = count
        return np.where(least <= end, least, count)


def _ranks(problem: CutProblem, scarcity: Scarcity | None) -> list[list[_Rank]]:
    """Values of each rank, without a price and for each price."""
    schedule, update = problem.schedule, problem.table.update
    pairs = [stages_of(schedule, rank) for rank in range(schedule.ranks)]
    saved = [_saved_counts(schedule, rank) for rank in range(schedule.ranks)]
    found: list[list[_Rank]] = [[] for _ in pairs]
    for room, surcharge in _priced(problem, scarcity):
        for rank, (one, two), counts in zip(found, pairs, saved, strict=True):
            first, second = (
                surcharge[count] * (schedule.micro_batches * problem.busy[stage] + update)
                for stage, count in zip((one, two), counts, strict=True)
            )
            rank.append(_Rank(np.triu(first + problem.ahead[one][:, None], 1), -_growing(second), room))
    return found


def _alone(problem: CutProblem, scarcity: Scarcity) -> float:
    """The bound where ranks have one stage each."""
    schedule, table = problem.schedule, problem.table
    bounds = [np.full_like(table.forward, -np.inf) for _ in range(schedule.stages)]
    for room, surcharge in _priced(problem, scarcity):
        for stage, bound in enumerate(bounds):
            (count,) = _saved_counts(schedule, schedule.rank_of(stage))
            work = schedule.micro_batches * problem.busy[stage] + table.sync + table.update
            np.maximum(bound, problem.ahead[stage][:, None] + surcharge[count] * work - room, out=bound)
    return float(bottleneck([each + free for each, free in zip(bounds, problem.allowed, strict=True)])[0][0])


def _priced(problem: CutProblem, scarcity: Scarcity | None) -> Iterator[tuple[float, dict[int, float]]]:
    """Worth of all the cap's bytes, and factors by which stages take longer, without a price and for each
    one."""
    schedule = problem.schedule
    counts = sorted({count for rank in range(schedule.ranks) for count in _saved_counts(schedule, rank)})
    yield 0.0, dict.fromkeys(counts, 1.0)
    for price in scarcity.prices if scarcity else ():
        assert scarcity is not None
        yield price * scarcity.cap, scarcity.surcharge(price, schedule.micro_batches, counts)


def _saved_counts(schedule: Schedule, rank: int) -> Counts:
    """How many micro-batches each stage of a rank saves when they are most in all."""
    stages = schedule.stages_per_rank
    return max((each[:stages] for each in flights(schedule)[rank].all()), key=sum)


def _meet(ranks: list[list[_Rank]], seconds: float) -> bool:
    """Whether the ranks can share the graph if each may take `seconds`."""
    count = len(ranks[0][0].first)
    least = np.full(count, count)
    least[0] = count - 1
    for rank in ranks:
        further = np.full(count, count)
        for place in np.flatnonzero(least < count).tolist():
            onward = [each.onward(place, int(least[place]), seconds) for each in rank]
            np.minimum(further, np.maximum.reduce(onward), out=further)
        least = further
    return bool((least == np.arange(count)).any())


def _growing(table: Table) -> Table:
    """The table, or less, so that no stage has less than one that lies in it."""
    void = np.tril(np.full_like(table, np.inf))
    least = np.minimum.accumulate(table + void, axis=0)  # over stages that begin earlier
    return np.triu(np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1], 1)  # ... or end later
