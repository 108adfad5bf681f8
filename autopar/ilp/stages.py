"""Where a program is cut into pipeline stages: so that the schedule's step is as short as can be.

**Sets.** Places p = 0 < ... < n where a cut may lie; K ranks, M micro-batches, S stages. A cut is a path
0 = p_0 < p_1 < ... < p_S = n, stage k the interval [p_k, p_(k+1)); it takes F + B seconds for one
micro-batch, B = I + W, and E once a step, to sum gradients and to update (cost/intervals.py).

**Minimise** the step time of the schedule (clock.py), the longest path through all its actions: no closed
form holds for uneven stages. **Subject to** each rank's bytes <= cap: state, the batch, what was sent
and what micro-batches in flight keep, and the most that an operator needs beside that.

**Bound.** Some paths through the actions are known in advance. With t the seconds for which a stage keeps
its rank busy for one micro-batch, h_k[p] the least that stages before it can take forward, b_k[p] backward,
r_k[p] the least that it takes from a cut p on through all later stages and back, no step of which [p, q)
is stage k takes less than

    Q_k[p,q] = max  h_k[p] + M t + E                       all its work, after the first micro-batch came
                    h_k[p] + M t + b_k[p]                  ... and the last gradient went, if B is not split
                    h_k[p] + M t - (w - 1) F + r_(k+1)[q]  it waits for its first gradient, after w forwards
                             (+ b_k[p] if B is not split; one stage per rank)

so min over paths of max_k Q_k, found by dynamic programming from the end, bounds all cuts from below.

**Search.** Under growing thresholds on Q, the path with the least sum of seconds; from the fastest of
these down to where no neighbour is faster; then every path all of whose Q are below the fastest known,
as long as there are not too many: if they come to an end, the cut is the best there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from autopar.clock import CutCosts, step_seconds
from autopar.core.schedule import ActionKind, Schedule, ScheduleKind
from autopar.core.timeline import StageCost
from autopar.cost.intervals import Intervals, Row, Table
from autopar.errors import InfeasibleError, InputError
from autopar.schedules import build_schedule
from autopar.units import show_bytes

MOST_PLACES = 240  # of cuts; tables and paths grow with the square
THRESHOLDS = (1.0, 1.003, 1.01, 1.03, 1.1)  # of the bound, for paths to start from
STRIDES = (1, 2, 4, 8, 16)  # places by which one cut moves
GROUP = 8  # neighbouring cuts that move together by one place
ROUNDS = 40  # of the descent
HOPELESS = 1.05  # times as slow as another schedule
BATCH = 256  # cuts timed at once
MOST_NODES = 4000  # partial cuts that the proof may visit
MOST_ACTIONS = 1_000_000  # to run through in the proof, and a tenth of them in the descent

Paths = NDArray[np.intp]  # [cut, stage + 1]: numbers of places


@dataclass(frozen=True, slots=True)
class Cut:
    """The first operator of each stage, seconds of a step, and a lower bound over all cuts at the same
    `places`, so many of them; what each stage costs, and the peak of bytes on one device of each stage and
    each rank."""

    starts: tuple[int, ...]
    seconds: float
    bound: float
    places: int
    stages: tuple[StageCost, ...]
    stage_bytes: tuple[int, ...]
    rank_bytes: tuple[int, ...]


def cut(table: Intervals, schedule: Schedule, *, cap: int | None = None) -> Cut:
    """The best cut for `schedule` whose ranks all stay below `cap` bytes per device.

    Raises InputError for more stages than places, InfeasibleError, with the least that would do, if no cut
    was found that meets the cap.
    """
    return _Problem(table, schedule, cap).solve()


def best_cut(
    table: Intervals, schedules: Sequence[Schedule], *, cap: int | None = None
) -> tuple[Cut, Schedule]:
    """The best cut under any of the schedules, with a bound for all of them.

    Schedules that cannot beat what was found, by their lower bounds, are not cut. Raises the
    InfeasibleError that asks for least if no schedule meets the cap.
    """
    problems = [_Problem(table, schedule, cap) for schedule in schedules]
    found: list[tuple[Cut, Schedule]] = []
    failures: list[InfeasibleError] = []
    for problem in sorted(problems, key=lambda problem: problem.bound):
        fastest = min((each.seconds for each, _ in found), default=math.inf)
        if found and problem.bound >= fastest:
            break
        try:
            found.append((problem.solve(beat=fastest), problem.schedule))
        except InfeasibleError as error:
            failures.append(error)
    if not found:
        raise min(failures, key=lambda error: error.least or 0)
    best, schedule = min(found, key=lambda each: each[0].seconds)
    return replace(best, bound=min(each.bound for each, _ in found)), schedule


def keep(table: Intervals, schedule: Schedule, starts: Sequence[int]) -> Cut:
    """The cut that is given, whose `starts` are places of the table, as it is."""
    problem = _Problem(table, schedule, None)
    path = np.searchsorted(table.places, [*starts, table.places[-1]])
    seconds = float(problem.seconds(path[None])[0])
    return problem.cut(path, seconds, seconds)


@lru_cache(maxsize=64)
def scheduled(kind: ScheduleKind, ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    """The schedule, made once; raises InputError if torch can't run it."""
    return build_schedule(kind, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


def choose_places(crossing: Sequence[int], most: int = MOST_PLACES) -> tuple[int, ...]:
    """Where cuts are sought: everywhere, or at `most` places, where less crosses than around them and
    then where least crosses.

    `crossing[p]` are the bytes that a cut before operator p sends; the ends 0 and n are always there.
    """
    count = len(crossing)
    inner = list(range(1, count))
    if len(inner) > most:
        padded = [math.inf, *crossing[1:], math.inf]
        least = [p for p in inner if padded[p] <= padded[p - 1] and padded[p] < padded[p + 1]]
        least = least[:: -(-len(least) // most)]
        others = sorted(set(inner).difference(least), key=lambda p: (crossing[p], p))
        inner = sorted([*least, *others[: most - len(least)]])
    return (0, *inner, count)


Counts = tuple[int, ...]


@lru_cache(maxsize=64)
def flights(schedule: Schedule) -> tuple[tuple[Counts, tuple[Counts, ...]], ...]:
    """For each rank the micro-batches that its stages, in order, keep at once, and then those of them whose
    backward is half done: at the rank's first B or W, and all such counts of later ones that no other one
    exceeds. A micro-batch is kept from its F to its B or W."""
    found = []
    for rank in range(schedule.ranks):
        own = [stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]
        now = [0] * len(own)
        half = [0] * len(own)
        seen: list[Counts] = []
        for action in schedule.actions(rank):
            stage = own.index(action.stage)
            match action.kind:
                case ActionKind.FORWARD:
                    now[stage] += 1
                case ActionKind.INPUT_GRADIENT:
                    half[stage] += 1
                case kind:
                    seen.append((*now, *half))
                    now[stage] -= 1
                    half[stage] -= kind is ActionKind.WEIGHT_GRADIENT
        first, later = seen[0], set(seen[1:])
        found.append((first, tuple(each for each in later if not any(_exceeds(o, each) for o in later))))
    return tuple(found)


def mean_flight(schedule: Schedule) -> float:
    """How many micro-batches a stage keeps at once, on the average stage."""
    kept = schedule.stages_per_rank
    most = (max(sum(each[:kept]) for each in (first, *later)) for first, later in flights(schedule))
    return sum(most) / schedule.stages


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


@dataclass(slots=True)
class _Problem:
    """The tables of the module's docstring for one schedule."""

    table: Intervals
    schedule: Schedule
    cap: int | None
    allowed: list[Table] = field(init=False)  # 0 where a stage fits, infinity elsewhere
    least: list[Table] = field(init=False)  # Q
    onward: list[Row] = field(init=False)  # the least largest Q from a cut on
    busy: Table = field(init=False)
    bound: float = field(init=False)

    def __post_init__(self) -> None:
        table, stages = self.table, self.schedule.stages
        if stages > len(table.places) - 1:
            raise InputError(
                where="stages",
                found=f"{stages} stages for {len(table.places) - 1} places to begin one",
                wanted="at most one for each operator",
                remedy="use fewer stages",
            )
        void = np.tril(np.full_like(table.forward, np.inf))
        self.allowed = [
            void + np.where(self.stage_bytes(stage) > self.cap, np.inf, 0.0) if self.cap is not None else void
            for stage in range(stages)
        ]
        self.busy = table.seconds
        if self.late:
            self.busy = self.busy + table.send[:, None] + table.send_back[None, :]
        self.least = self.undercut()
        self.onward = [np.full(len(table.places), np.inf) for _ in range(stages + 1)]
        self.onward[stages][-1] = 0.0
        for stage in reversed(range(stages)):
            self.onward[stage] = np.maximum(self.least[stage], self.onward[stage + 1][None, :]).min(axis=1)
        self.bound = max(float(self.onward[0][0]), self.share())

    # -- the bound ------------------------------------------------------------------------------------

    @property
    def late(self) -> bool:
        """Whether ranks wait for what they receive."""
        return self.schedule.kind in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)

    @property
    def whole(self) -> bool:
        """Whether no backward is split in two."""
        return self.late or self.schedule.kind is ScheduleKind.INTERLEAVED

    def undercut(self) -> list[Table]:
        """Q of every stage."""
        table, count = self.table, self.schedule.micro_batches
        back = table.input_gradient + (table.weight_gradient if self.whole else 0.0)
        if self.late:
            forward, back = table.forward + table.send[:, None], back + table.send_back[None, :]
            chain = forward + back
        else:
            forward = table.forward
            chain = forward + back + self.hops(table.send)[:, None] + self.hops(table.send_back)[:, None]
        ahead = self.heads(forward, self.hops(table.send))
        behind = self.heads(back, self.hops(table.send_back)) if self.whole else None
        after = self.tails(chain)
        work = count * self.busy
        found = []
        for stage in range(self.schedule.stages):
            begun = ahead[stage][:, None] + work
            bounds = [begun + table.sync + table.update]
            home = behind[stage][:, None] if behind is not None else 0.0
            bounds.append(begun + home)
            if self.schedule.stages_per_rank == 1:
                waiting = self.forwards_before(stage) - 1
                bounds.append(begun - waiting * forward + after[stage + 1][None, :] + home)
            found.append(np.maximum.reduce(bounds) + self.allowed[stage])
        return found

    def hops(self, row: Row) -> Row:
        """Seconds of hops at cuts where they hold up a chain of stages beside what `busy` has; none
        where stages may lie on one rank."""
        return np.zeros_like(row) if self.late or self.schedule.kind.is_v else row

    def forwards_before(self, rank: int) -> int:
        """How many forwards a rank begins with; all of GPipe's are on the way to its first gradient."""
        if self.schedule.kind is ScheduleKind.GPIPE:
            return 1
        actions = self.schedule.actions(rank)
        return next(index for index, action in enumerate(actions) if action.kind is not ActionKind.FORWARD)

    def heads(self, seconds: Table, hop: Row) -> list[Row]:
        """For each stage and place the least sum of `seconds` of the stages before, and their hops."""
        found = [np.full(len(self.table.places), np.inf)]
        found[0][0] = 0.0
        for stage in range(self.schedule.stages - 1):
            step = found[-1][:, None] + seconds + self.allowed[stage]
            found.append(step.min(axis=0) + hop)
        return found

    def tails(self, seconds: Table) -> list[Row]:
        """For each stage and place the least sum of `seconds` of it and the stages behind."""
        last = np.full(len(self.table.places), np.inf)
        last[-1] = 0.0
        found = [last]
        for stage in reversed(range(self.schedule.stages)):
            found.append((seconds + self.allowed[stage] + found[-1][None, :]).min(axis=1))
        return found[::-1]

    def share(self) -> float:
        """The busiest rank works at least as long as the average one."""
        total = float(self.tails(self.busy)[0][0])
        return self.schedule.micro_batches * total / self.schedule.ranks

    # -- memory ---------------------------------------------------------------------------------------

    def lasting(self, stage: int) -> Table:
        """Of a stage: its state, on the first of a rank's stages the batch, and what was sent, outputs and
        gradients of inputs, which torch's schedules of several stages keep until the step ends."""
        table, count = self.table, self.schedule.micro_batches
        batch = count * table.batch if stage < self.schedule.ranks else 0.0
        sent = self.is_sent_late(stage) * table.received[None, :]
        sent = sent + self.is_sent_late(stage - 1) * table.received_back[:, None]
        return np.triu(table.state + batch + count * sent, 1)

    def kept(self, stage: int) -> Table:
        """By a micro-batch in flight, with its output if that doesn't last longer."""
        own = 0.0 if self.is_sent_late(stage) else self.table.received[None, :]
        return np.triu(self.table.kept + own, 1)

    def is_sent_late(self, stage: int) -> bool:
        """Whether what a stage sends to the next one leaves at some time, while the rank goes on."""
        schedule = self.schedule
        if self.late or not 0 <= stage < schedule.stages - 1:
            return False
        return schedule.rank_of(stage) != schedule.rank_of(stage + 1)

    def stage_bytes(self, stage: int) -> Table:
        """The peak of a rank with this one stage alone."""
        table, rank = self.table, self.schedule.rank_of(stage)
        own = [each for each in range(self.schedule.stages) if self.schedule.rank_of(each) == rank]
        place, count = own.index(stage), len(own)

        def kept(counts: Counts) -> Table:
            return counts[place] * self.kept(stage) + counts[count + place] * table.held

        first, later = flights(self.schedule)[rank]
        peak = kept(first) + table.early - table.gradients
        for counts in later:
            peak = np.maximum(peak, kept(counts) + table.working)
        return np.triu(self.lasting(stage) + peak, 1)

    def rank_bytes(self, paths: Paths) -> NDArray[np.float64]:
        """Peaks [cut, rank], all stages of a rank together."""
        starts, stops = paths[:, :-1], paths[:, 1:]
        table = self.table
        stages = range(self.schedule.stages)
        ends = list(zip(starts.T, stops.T, strict=True))
        lasting = np.stack([self.lasting(each)[ends[each]] for each in stages], axis=1)
        kept = np.stack([self.kept(each)[ends[each]] for each in stages], axis=1)
        gradients, held = table.gradients[starts, stops], table.held[starts, stops]
        working, early = table.working[starts, stops], table.early[starts, stops]
        found = []
        for rank, (first, later) in enumerate(flights(self.schedule)):
            own = [stage for stage in stages if self.schedule.rank_of(stage) == rank]
            both = np.concatenate([kept[:, own], held[:, own]], axis=1)
            peak = both @ np.asarray(first, dtype=float) + early[:, own].max(axis=1)
            peak = peak - gradients[:, own].sum(axis=1)
            for counts in later:
                moment = both @ np.asarray(counts, dtype=float) + working[:, own].max(axis=1)
                peak = np.maximum(peak, moment)
            found.append(lasting[:, own].sum(axis=1) + peak)
        return np.stack(found, axis=1)

    # -- time -----------------------------------------------------------------------------------------

    def costs(self, paths: Paths) -> CutCosts:
        table, starts, stops = self.table, paths[:, :-1].T, paths[:, 1:].T
        return CutCosts(
            forward=table.forward[starts, stops],
            input_gradient=table.input_gradient[starts, stops],
            weight_gradient=table.weight_gradient[starts, stops],
            send_output=table.send[stops],
            send_gradient=table.send_back[starts],
            sync=table.sync[starts, stops],
            update=table.update[starts, stops],
        )

    def seconds(self, paths: Paths) -> NDArray[np.float64]:
        """Step times [cut], infinity for those that don't fit."""
        found: NDArray[np.float64] = step_seconds(self.schedule, self.costs(paths))
        if self.cap is None:
            return found
        return np.where((self.rank_bytes(paths) > self.cap).any(axis=1), np.inf, found)

    def stage_costs(self, path: NDArray[np.intp]) -> tuple[StageCost, ...]:
        costs, table = self.costs(path[None]), self.table
        starts, stops = path[:-1], path[1:]
        return tuple(
            StageCost(
                forward=float(costs.forward[stage, 0]),
                input_gradient=float(costs.input_gradient[stage, 0]),
                weight_gradient=float(costs.weight_gradient[stage, 0]),
                send_output=float(costs.send_output[stage, 0]),
                send_gradient=float(costs.send_gradient[stage, 0]),
                sync=float(costs.sync[stage, 0]),
                update=float(costs.update[stage, 0]),
                state=int(table.state[p, q]),
                lasting=int(self.lasting(stage)[p, q] - table.state[p, q]),
                kept=int(self.kept(stage)[p, q]),
                kept_for_weight=int(self.kept(stage)[p, q] + table.held[p, q]),
                working=int(table.working[p, q]),
                gradients=int(table.gradients[p, q]),
                early=int(table.early[p, q]),
            )
            for stage, (p, q) in enumerate(zip(starts, stops, strict=True))
        )

    def cut(self, path: NDArray[np.intp], seconds: float, bound: float) -> Cut:
        return Cut(
            starts=tuple(self.table.places[place] for place in path[:-1]),
            seconds=seconds,
            bound=bound,
            places=len(self.table.places) - 1,
            stages=self.stage_costs(path),
            stage_bytes=tuple(
                int(self.stage_bytes(stage)[path[stage], path[stage + 1]]) for stage in range(len(path) - 1)
            ),
            rank_bytes=tuple(int(nbytes) for nbytes in self.rank_bytes(path[None])[0]),
        )

    # -- the search -----------------------------------------------------------------------------------

    def solve(self, *, beat: float = math.inf) -> Cut:
        """The best cut; the search ends where it starts if that is far above `beat` seconds."""
        best = self.start()
        if best is None:
            raise _infeasible(self.table, self.schedule, self.cap or 0)
        proven = False
        if best[1] <= beat * HOPELESS:
            best, proven = self.prove(self.descend(best))
        path, seconds = best
        return self.cut(path, seconds, seconds if proven else min(seconds, self.bound))

    @property
    def actions(self) -> int:
        """About so many does the schedule have."""
        return 2 * self.schedule.stages * self.schedule.micro_batches

    def start(self) -> tuple[NDArray[np.intp], float] | None:
        """The fastest of the paths with the least sum of seconds under some thresholds on Q."""
        if not math.isfinite(self.onward[0][0]):
            return None
        found = [self.shortest(limit * self.onward[0][0]) for limit in THRESHOLDS]
        if self.cap is not None and self.schedule.stages_per_rank > 1:
            found += [self.shortest(math.inf, nbytes=self.cap * part // 100) for part in (60, 50, 45)]
        paths = np.unique(np.stack([path for path in found if path is not None]), axis=0)
        return _fastest(paths, self.seconds(paths))

    def shortest(self, limit: float, *, nbytes: float | None = None) -> NDArray[np.intp] | None:
        """The path with the least sum of seconds whose Q are at most `limit`, and the stages' own bytes
        at most `nbytes`; None if there is none."""
        stages, size = self.schedule.stages, len(self.table.places)
        weighed = self.schedule.micro_batches * self.busy + self.table.sync + self.table.update
        best = np.full(size, np.inf)
        best[-1] = 0.0
        following = []
        for stage in reversed(range(stages)):
            step = np.where(self.least[stage] <= limit * (1 + 1e-12), weighed, np.inf)
            if nbytes is not None:
                step = np.where(self.stage_bytes(stage) <= nbytes, step, np.inf)
            step = step + best[None, :]
            following.append(step.argmin(axis=1))
            best = step.min(axis=1)
        if not math.isfinite(best[0]):
            return None
        path = [0]
        for choice in reversed(following):
            path.append(int(choice[path[-1]]))
        return np.asarray(path)

    def descend(self, best: tuple[NDArray[np.intp], float]) -> tuple[NDArray[np.intp], float]:
        """Move cuts for as long as that is faster."""
        for _ in range(min(ROUNDS, 1 + MOST_ACTIONS // 10 // self.actions)):
            around = self.neighbours(best[0])
            found = _fastest(around, self.seconds(around)) if len(around) else None
            if found is None or found[1] >= best[1] * (1 - 1e-9):
                return best
            best = found
        return best

    def neighbours(self, path: NDArray[np.intp]) -> Paths:
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

    def prove(self, best: tuple[NDArray[np.intp], float]) -> tuple[tuple[NDArray[np.intp], float], bool]:
        """Time all cuts whose Q are below the fastest known; whether there were few enough to do so."""
        contenders, finished = self.contenders(best[1]), True
        while batch := list(islice(contenders, BATCH)):
            finished = batch[-1] is not None
            paths = [path for path in batch if path is not None]
            found = _fastest(np.asarray(paths), self.seconds(np.asarray(paths))) if paths else None
            if found is not None and found[1] < best[1]:
                best = found
        return best, finished

    def contenders(self, limit: float) -> Iterator[list[int] | None]:
        """The paths all of whose Q are below `limit`, depth first; None, and the end, if there are too
        many."""
        limit, nodes = limit * (1 - 1e-9), min(MOST_NODES, 1 + MOST_ACTIONS // self.actions)
        waiting = [[0]]
        while waiting:
            path = waiting.pop()
            stage = len(path) - 1
            if stage == self.schedule.stages:
                yield path
                continue
            if nodes == 0:
                yield None
                return
            nodes -= 1
            reach = np.maximum(self.least[stage][path[-1]], self.onward[stage + 1])
            good = np.flatnonzero(reach < limit)
            waiting += [[*path, int(place)] for place in good[np.argsort(-reach[good], kind="stable")]]


def _fastest(paths: Paths, seconds: NDArray[np.float64]) -> tuple[NDArray[np.intp], float] | None:
    index = int(seconds.argmin())
    return (paths[index], float(seconds[index])) if math.isfinite(seconds[index]) else None


def least_bytes(table: Intervals, schedule: Schedule) -> int:
    """The least cap under which each stage fits by itself: all there is to it with one stage per rank."""
    problem = _Problem(table, schedule, None)
    best = np.full(len(table.places), np.inf)
    best[-1] = 0.0
    for stage in reversed(range(schedule.stages)):
        nbytes = problem.stage_bytes(stage) + problem.allowed[stage]
        best = np.maximum(nbytes, best[None, :]).min(axis=1)
    return int(best[0])


def _infeasible(table: Intervals, schedule: Schedule, cap: int) -> InfeasibleError:
    least = least_bytes(table, schedule)
    return InfeasibleError(
        where=f"memory cap with {schedule.ranks} pipeline ranks, {schedule.micro_batches} micro-batches, "
        f"{schedule.kind.value}",
        found=f"{show_bytes(cap)} per device",
        wanted=f"at least {show_bytes(least)} ({least} bytes)",
        remedy="raise --memory, use more devices or stages, or more and thus smaller micro-batches",
        least=least,
    )
