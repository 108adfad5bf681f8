"""Where a program is cut into pipeline stages: so that the schedule's step is as short as can be.

**Sets.** Places p = 0 < ... < n where a cut may lie; K ranks, M micro-batches, S stages. A cut is a path
0 = p_0 < p_1 < ... < p_S = n, stage k the interval [p_k, p_(k+1)); it takes F + B seconds for one
micro-batch, B = I + W, and E once a step, to sum gradients and to update (cost/stages/intervals.py).

**Minimise** the step time of the schedule (simulate_many.py), the longest path through all its actions: no
closed form holds for uneven stages. **Subject to** each rank's bytes <= cap. What cuts take, keep and can't
fall below, Q_k of stage k, say tables (cut_costs.py).

**Search.** Under growing thresholds on Q, the path with the least sum of seconds. Q looks at stages one by
one: where ranks have several, also paths whose cuts were moved until ranks fit and are as busy as each other.
From the fastest of these down to where no neighbour is faster; then every path all of whose Q are below the
fastest known, as long as there are not too many: if they come to an end, the cut is the best there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.core.schedule import Schedule
from autopar.core.timeline import StageCost
from autopar.cost.interval_table import Table
from autopar.cost.program.recompute import Shares
from autopar.cost.stages.intervals import Intervals
from autopar.errors import InfeasibleError, InputError
from autopar.solve.program.solution import check_cutoff
from autopar.solve.stages.cut_costs import CutProblem, Path, Paths, bottleneck
from autopar.solve.stages.memory_levels import Mix
from autopar.solve.stages.rank_bounds import Scarcity, pair_bound
from autopar.units import show_bytes

MOST_CUT_PLACES = 240  # of cuts; tables and paths grow with the square
THRESHOLDS = (1.0, 1.003, 1.01, 1.03, 1.1)  # of the bound, for paths to start from
STARTS = 2  # of them, the fastest, where ranks have several stages
EVENED_STARTS = 3  # of them that are moved until ranks are even
FORBIDDEN = 1e3  # times the seconds of a rank for all the cap's bytes that are too many
POWER = 32  # of a norm of ranks' seconds that is nearly their maximum
STRIDES = (1, 2, 4, 8, 16)  # places by which one cut moves
GROUP = 8  # neighbouring cuts that move together by one place
DESCENT_ROUNDS = 40  # of the descent
HOPELESS = 1.05  # times as slow as another schedule
BATCH = 256  # cuts timed at once
MOST_PROOF_NODES = 4000  # partial cuts that the proof may visit
MOST_PROOF_ACTIONS = 1_000_000  # to run through in the proof, and a tenth of them in the descent


@dataclass(frozen=True, slots=True)
class Cut:
    """The first operator of each stage, the seconds of a step, and a lower bound. The bound holds for all
    cuts at the same `places`, so many of them; what each stage costs, and the peak of bytes on one device of
    each stage and each rank. `mixes` says for each stage which of several tables it takes."""

    starts: tuple[int, ...]
    seconds: float
    bound: float
    places: int
    mixes: tuple[Mix, ...]
    stages: tuple[StageCost, ...]
    stage_bytes: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    room: tuple[int, ...] = ()  # of each rank's devices beside the cap, where they are unlike

    @property
    def rooms(self) -> tuple[int, ...]:
        """Bytes that each rank's devices have beside the cap, which is that of the smallest."""
        return self.room or (0,) * len(self.rank_bytes)

    @property
    def fullest(self) -> int:
        """The rank that comes nearest to its cap, or is most above it."""
        return max(range(len(self.rank_bytes)), key=lambda rank: self.rank_bytes[rank] - self.rooms[rank])

    def over(self, cap: int) -> int:
        """Bytes that the fullest rank has above its cap, `cap` on the smallest; negative if there is room."""
        return self.rank_bytes[self.fullest] - self.rooms[self.fullest] - cap


def cut(table: Intervals, schedule: Schedule, *, cap: int | None = None) -> Cut:
    """The best cut for `schedule` whose ranks all stay below `cap` bytes per device.

    Raises InputError for more stages than places, InfeasibleError, with the least that would do, if no cut
    was found that meets the cap.
    """
    return _CutSearch(CutProblem([table], schedule, cap)).solve()


ScheduledCut: TypeAlias = tuple[Cut, Schedule]
Worth: TypeAlias = Callable[[Paths, float], NDArray[np.float64]]  # of cuts; any from a limit on may be inf


def best(found: Sequence[ScheduledCut]) -> ScheduledCut:
    """Choose the fastest cut, with a bound for all of them."""
    fastest, schedule = min(found, key=lambda each: each[0].seconds)
    return replace(fastest, bound=min(each.bound for each, _ in found)), schedule


def cuts(
    tables: Sequence[Intervals],
    schedules: Sequence[Schedule],
    *,
    cap: int | None = None,
    known: Sequence[int] | None = None,
    free: Sequence[ScheduledCut] = (),
    limit: float = math.inf,
) -> list[ScheduledCut]:
    """The best cut under each of the schedules but for those that can't beat another, by their lower bounds.

    `tables` are the levels between which stages choose; ranks part their memory by the first. The search also
    begins where a `known` cut starts its stages, if one is given; those of the best cuts without a cap,
    `free`, that meet it are not sought anew. Raises the InfeasibleError that asks for least if no schedule
    meets the cap, CutoffError if by their bounds all take `limit` seconds or more.
    """
    hopeless = HOPELESS * min((each.seconds for each, _ in free), default=math.inf)
    fits = [each for each in free if cap is None or each[0].over(cap) <= 0]
    found = [each for each in fits if each[0].seconds <= hopeless]
    done = {schedule.kind for _, schedule in found}
    problems = [CutProblem(tables, schedule, cap) for schedule in schedules if schedule.kind not in done]
    failures: list[InfeasibleError] = []
    if problems and not found:
        check_cutoff(min(problem.bound for problem in problems), limit)
    for problem in sorted(problems, key=lambda problem: problem.bound):
        fastest = min((each.seconds for each, _ in found), default=math.inf)
        if found and problem.bound >= min(fastest, limit):
            break
        try:
            found.append((_CutSearch(problem, known).solve(cutoff=fastest), problem.schedule))
        except InfeasibleError as error:
            failures.append(error)
    if not found:
        raise min(failures, key=lambda error: error.least or 0)
    return found


def recomputing_bound(table: Intervals, shares: Shares, schedules: Sequence[Schedule], *, cap: int) -> float:
    """A lower bound on the seconds of all cuts under `cap`, whatever is recomputed.

    `table` is the one without that. To keep D bytes less for each micro-batch, beside those that hide on the
    way to the host, a stage takes at least the seconds of the operators that spare most for theirs, and a
    part of one: with l seconds per byte,

        max over l of  l D - sum over its operators of max(0, l spared - seconds)
    """
    return min(CutProblem([table], schedule, cap, shares=shares).bound for schedule in schedules)


def closer_bound(
    table: Intervals, schedules: Sequence[Schedule], *, most: float, scarcity: Scarcity | None = None
) -> float:
    """A lower bound on the seconds of all cuts, closer and dearer: as far as `most` seconds. All that it
    knows of a cap is `scarcity`."""
    found = most
    for schedule in schedules:
        found = min(found, pair_bound(CutProblem([table], schedule, None), found, scarcity))
    return found


def cut_at(table: Intervals, schedule: Schedule, starts: Sequence[int]) -> Cut:
    """The cut that is given, whose `starts` are places of the table, as it is; stages may be empty."""
    problem = CutProblem([table], schedule, None)
    path = np.searchsorted(table.places, [*starts, table.places[-1]])
    seconds = float(problem.seconds(path[None])[0])
    return _cut(problem, path, seconds, seconds)


def _cut(problem: CutProblem, path: Path, seconds: float, bound: float) -> Cut:
    table, stages = problem.table, range(problem.schedule.stages)
    return Cut(
        starts=tuple(table.places[place] for place in path[:-1]),
        seconds=seconds,
        bound=bound,
        places=len(table.places) - 1,
        mixes=tuple(mixes.at(path[stage], path[stage + 1]) for stage, mixes in enumerate(problem.mixes)),
        stages=problem.stage_costs(path),
        stage_bytes=tuple(int(problem.stage_bytes(stage)[path[stage], path[stage + 1]]) for stage in stages),
        rank_bytes=tuple(int(nbytes) for nbytes in problem.rank_bytes(path[None])[0]),
        room=table.room,
    )


@dataclass(frozen=True, slots=True)
class _CutSearch:
    """Searches for the best cut of a problem; it may begin where a `known` one starts its stages."""

    problem: CutProblem
    known: Sequence[int] | None = None

    def solve(self, *, cutoff: float = math.inf) -> Cut:
        """Find the best cut; the search ends where it starts if that is far above `cutoff` seconds."""
        problem = self.problem
        stages, places = problem.schedule.stages, len(problem.table.places) - 1
        if stages > places:
            raise InputError(
                where="stages",
                found=f"{stages} stages for {places} places to begin one",
                wanted="at most one for each operator",
                remedy="use fewer stages",
            )
        starts = self.starts()
        if not starts:
            raise _infeasible(problem.levels, problem.schedule, problem.cap or 0)
        best, proven = starts[0], False
        if best[1] <= cutoff * HOPELESS:
            rounds = min(DESCENT_ROUNDS, 1 + MOST_PROOF_ACTIONS // 10 // self.actions)
            ends = [self.descend(start, problem.seconds, rounds) for start in starts]
            best, proven = self.prove(min(ends, key=lambda each: each[1]))
        path, seconds = best
        return _cut(problem, path, seconds, seconds if proven else min(seconds, problem.bound))

    @property
    def actions(self) -> int:
        """About so many does the schedule have."""
        return 2 * self.problem.schedule.stages * self.problem.schedule.micro_batches

    def starts(self) -> list[tuple[Path, float]]:
        """The fastest of some paths that fit, to start from."""
        problem = self.problem
        if not math.isfinite(problem.onward[0][0]):
            return []
        found = [self.shortest(problem.least, limit * problem.onward[0][0]) for limit in THRESHOLDS]
        if several := problem.schedule.stages_per_rank > 1:
            void = np.tril(np.full_like(problem.table.forward, np.inf))
            even = [table.seconds + void for table in problem.tables]
            longest = float(bottleneck(even)[0][0])
            found += [self.shortest(even, limit * longest) for limit in THRESHOLDS]
        if self.known is not None:
            places = problem.table.places
            found.append(np.searchsorted(places, [*self.known, places[-1]]))
        paths = np.unique(np.stack([path for path in found if path is not None]), axis=0)
        if several:
            first = paths[np.argsort(self.unevenness(paths), kind="stable")[:EVENED_STARTS]]
            settled = [
                self.descend((path, math.inf), lambda paths, _: self.unevenness(paths))[0] for path in first
            ]
            paths = np.unique(np.concatenate([paths, settled]), axis=0)
        seconds = problem.seconds(paths)
        few = np.argsort(seconds, kind="stable")[: STARTS if several else 1]
        return [(paths[index], float(seconds[index])) for index in few if math.isfinite(seconds[index])]

    def unevenness(self, paths: Paths) -> NDArray[np.float64]:
        """Approximate seconds of the slowest rank [cut], and far more for bytes above the cap."""
        problem = self.problem
        seconds = problem.rank_seconds(paths)
        most = seconds.max(axis=1)
        about: NDArray[np.float64] = most * ((seconds / most[:, None]) ** POWER).mean(axis=1) ** (1 / POWER)
        if problem.cap is None:
            return about
        excess = (problem.rank_bytes(paths) / problem.caps - 1).clip(min=0.0).sum(axis=1)
        found: NDArray[np.float64] = about * (1 + FORBIDDEN * excess)
        return found

    def shortest(self, seconds: Sequence[Table], limit: float) -> Path | None:
        """The path with the least sum of seconds whose stages take at most `limit` by their tables of
        `seconds`; None if there is none."""
        problem = self.problem
        best = np.full(len(problem.table.places), np.inf)
        best[-1] = 0.0
        following = []
        for stage in reversed(range(problem.schedule.stages)):
            table, count = problem.tables[stage], problem.schedule.micro_batches
            weighed = count * problem.busy[stage] + table.sync + table.update
            step = np.where(seconds[stage] <= limit * (1 + 1e-12), weighed, np.inf) + best[None, :]
            following.append(step.argmin(axis=1))
            best = step.min(axis=1)
        if not math.isfinite(best[0]):
            return None
        path = [0]
        for choice in reversed(following):
            path.append(int(choice[path[-1]]))
        return np.asarray(path)

    def descend(
        self, best: tuple[Path, float], worth: Worth, rounds: int = DESCENT_ROUNDS
    ) -> tuple[Path, float]:
        """Move cuts for as long as that makes them less in `worth`."""
        for _ in range(rounds):
            around, below = self.neighbours(best[0]), best[1] * (1 - 1e-9)
            found = _fastest(around, worth(around, below)) if len(around) else None
            if found is None or found[1] >= below:
                return best
            best = found
        return best

    def neighbours(self, path: Path) -> Paths:
        """One cut moved by some places, or some neighbouring cuts moved by one."""
        inner = len(path) - 2
        shifts = [(low, low + 1, sign * by) for low in range(inner) for by in STRIDES for sign in (1, -1)]
        shifts += [
            (low, high, by)
            for low in range(inner)
            for high in range(low + 2, min(inner, low + GROUP) + 1)
            for by in (1, -1)
        ]
        if not shifts:
            return np.empty((0, len(path)), dtype=np.intp)
        found = np.repeat(path[None], len(shifts), axis=0)
        for row, (low, high, by) in zip(found, shifts, strict=True):
            row[low + 1 : high + 1] += by
        return found[(np.diff(found, axis=1) > 0).all(axis=1)]

    def prove(self, best: tuple[Path, float]) -> tuple[tuple[Path, float], bool]:
        """Time all cuts whose Q are below the fastest known; whether there were few enough to do so."""
        contenders, finished = self.contenders(best[1]), True
        while batch := list(islice(contenders, BATCH)):
            finished = batch[-1] is not None
            paths = np.asarray([path for path in batch if path is not None])
            found = _fastest(paths, self.problem.seconds(paths, best[1])) if len(paths) else None
            if found is not None and found[1] < best[1]:
                best = found
        return best, finished

    def contenders(self, limit: float) -> Iterator[list[int] | None]:
        """The paths all of whose Q are below `limit`, depth first; None, and the end, if there are too
        many."""
        limit, nodes = limit * (1 - 1e-9), min(MOST_PROOF_NODES, 1 + MOST_PROOF_ACTIONS // self.actions)
        waiting = [[0]]
        while waiting:
            path = waiting.pop()
            stage = len(path) - 1
            if stage == self.problem.schedule.stages:
                yield path
                continue
            if nodes == 0:
                yield None
                return
            nodes -= 1
            reach = np.maximum(self.problem.least[stage][path[-1]], self.problem.onward[stage + 1])
            good = np.flatnonzero(reach < limit)
            waiting += [[*path, int(place)] for place in good[np.argsort(-reach[good], kind="stable")]]


def _fastest(paths: Paths, seconds: NDArray[np.float64]) -> tuple[Path, float] | None:
    index = int(seconds.argmin())
    return (paths[index], float(seconds[index])) if math.isfinite(seconds[index]) else None


def least_bytes(tables: Sequence[Intervals], schedule: Schedule) -> int:
    """A cap that would do: the least under which each stage fits by itself, or with several stages per rank
    the bytes of the fullest rank then."""
    problem = CutProblem(tables, schedule, 0)  # in which every stage takes the smallest level
    best = np.full(len(problem.table.places), np.inf)
    best[-1] = -np.inf
    void, following = np.tril(np.full_like(problem.table.forward, np.inf)), []
    for stage in reversed(range(schedule.stages)):
        beside = problem.stage_bytes(stage) - problem.caps[schedule.rank_of(stage)]
        most = np.maximum(beside + void, best[None, :])
        following.append(most.argmin(axis=1))
        best = most.min(axis=1)
    path = [0]
    for choice in reversed(following):
        path.append(int(choice[path[-1]]))
    return int((problem.rank_bytes(np.asarray(path)[None]) - problem.caps).max())


def _infeasible(tables: Sequence[Intervals], schedule: Schedule, cap: int) -> InfeasibleError:
    least = least_bytes(tables, schedule)
    return InfeasibleError(
        where=f"memory cap with {schedule.ranks} pipeline ranks, {schedule.micro_batches} micro-batches, "
        f"{schedule.kind.value}",
        found=f"{show_bytes(cap)} per device",
        wanted=f"at least {show_bytes(least)} ({least} bytes)",
        remedy="raise --memory, use more devices or stages, or more and thus smaller micro-batches",
        least=least,
    )
