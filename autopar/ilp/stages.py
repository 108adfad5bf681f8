"""Where a program is cut into pipeline stages: so that the schedule's step is as short as can be.

**Sets.** Places p = 0 < ... < n where a cut may lie; K ranks, M micro-batches, S stages. A cut is a path
0 = p_0 < p_1 < ... < p_S = n, stage k the interval [p_k, p_(k+1)); it takes F + B seconds for one
micro-batch, B = I + W, and E once a step, to sum gradients and to update (cost/intervals.py).

**Minimise** the step time of the schedule (clock.py), the longest path through all its actions: no closed
form holds for uneven stages. **Subject to** each rank's bytes <= cap: state, the batch, what was sent
and what micro-batches in flight keep, and the most that an operator needs beside that.

Where parts may be computed again, a table stands for each level of that (recompute.py). Each stage takes the
fastest level that fits, which depends on how many micro-batches it keeps, and for as large a share as still
fits a faster one: levels are few, but blocks in a stage are several, so what lies between two is near. Stages
of one rank part its memory by what they keep.

**Bound.** Some paths through the actions are known in advance. With t the seconds for which a stage keeps
its rank busy for one micro-batch, h_k[p] the least that stages before it can take forward, b_k[p] backward,
r_k[p] the least that it takes from a cut p on through all later stages and back, no step of which [p, q)
is stage k takes less than

    Q_k[p,q] = max  h_k[p] + M t + E                       all its work, after the first micro-batch came
                    h_k[p] + M t + b_k[p]                  ... and the last gradient went, if B is not split
                    h_k[p] + M t - (w - 1) F + r_(k+1)[q]  it waits for its first gradient, after w forwards
                    h_k[p] + (M - w + 1) t + 2 r_(k+1)[q]  and for that of its last forward, which comes later
                             (+ b_k[p] if B is not split; one stage per rank)

so min over paths of max_k Q_k, found by dynamic programming from the end, bounds all cuts from below.

**Search.** Under growing thresholds on Q, the path with the least sum of seconds; from the fastest of
these down to where no neighbour is faster; then every path all of whose Q are below the fastest known,
as long as there are not too many: if they come to an end, the cut is the best there is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from autopar.clock import CutCosts, step_seconds
from autopar.core.schedule import SPLIT_BACKWARD, ActionKind, Schedule, ScheduleKind
from autopar.core.timeline import StageCost
from autopar.cost.again import Shares
from autopar.cost.intervals import Intervals
from autopar.cost.rectangles import Row, Table
from autopar.errors import InfeasibleError, InputError
from autopar.schedules import build_schedule
from autopar.units import show_bytes

MOST_PLACES = 240  # of cuts; tables and paths grow with the square
THRESHOLDS = (1.0, 1.003, 1.01, 1.03, 1.1)  # of the bound, for paths to start from
STARTS = 2  # of them, the fastest, where ranks have several stages
STRIDES = (1, 2, 4, 8, 16)  # places by which one cut moves
GROUP = 8  # neighbouring cuts that move together by one place
ROUNDS = 40  # of the descent
HOPELESS = 1.05  # times as slow as another schedule
BATCH = 256  # cuts timed at once
MOST_NODES = 4000  # partial cuts that the proof may visit
QUANTILES = tuple(step / 16 for step in range(17))  # of seconds per byte, tried as a price
MOST_ACTIONS = 1_000_000  # to run through in the proof, and a tenth of them in the descent

Paths = NDArray[np.intp]  # [cut, stage + 1]: numbers of places


@dataclass(frozen=True, slots=True)
class Mix:
    """The levels of a stage: `rich` for a `share` of it at its end, and `lean` before."""

    lean: int
    rich: int
    share: float


@dataclass(frozen=True, slots=True)
class Cut:
    """The first operator of each stage, seconds of a step, and a lower bound over all cuts at the same
    `places`, so many of them; what each stage costs, and the peak of bytes on one device of each stage and
    each rank. `mixes` says for each stage which of several tables it takes."""

    starts: tuple[int, ...]
    seconds: float
    bound: float
    places: int
    mixes: tuple[Mix, ...]
    stages: tuple[StageCost, ...]
    stage_bytes: tuple[int, ...]
    rank_bytes: tuple[int, ...]


def cut(table: Intervals, schedule: Schedule, *, cap: int | None = None) -> Cut:
    """The best cut for `schedule` whose ranks all stay below `cap` bytes per device.

    Raises InputError for more stages than places, InfeasibleError, with the least that would do, if no cut
    was found that meets the cap.
    """
    return _Problem([table], schedule, cap).solve()


def best_cut(
    tables: Sequence[Intervals], schedules: Sequence[Schedule], *, cap: int | None = None
) -> tuple[Cut, Schedule]:
    """The best cut under any of the schedules, with a bound for all of them.

    `tables` are the levels of recomputing, from none on; there is none but that if backward is split in
    two. Schedules that cannot beat what was found, by their lower bounds, are not cut. Raises the
    InfeasibleError that asks for least if no schedule meets the cap.
    """
    problems = [_Problem(_levels(tables, schedule), schedule, cap) for schedule in schedules]
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


def bound_again(table: Intervals, shares: Shares, schedules: Sequence[Schedule], *, cap: int) -> float:
    """A lower bound on the seconds of all cuts under `cap`, whatever is computed again; where backward is
    split, nothing is.

    `table` is the one without that. To keep D bytes less for each micro-batch a stage takes at least the
    seconds of the operators that spare most for theirs, and a part of one: with l seconds per byte,

        max over l of  l D - sum over its operators of max(0, l spared - seconds)
    """
    return min(
        _Problem([table], schedule, cap, shares=None if schedule.kind in SPLIT_BACKWARD else shares).bound
        for schedule in schedules
    )


def _levels(tables: Sequence[Intervals], schedule: Schedule) -> Sequence[Intervals]:
    """Those among which its stages choose."""
    return tables[:1] if schedule.kind in SPLIT_BACKWARD else tables


def keep(table: Intervals, schedule: Schedule, starts: Sequence[int]) -> Cut:
    """The cut that is given, whose `starts` are places of the table, as it is; stages may be empty."""
    problem = _Problem([table], schedule, None)
    path = np.searchsorted(table.places, [*starts, table.places[-1]])
    seconds = float(problem.seconds(path[None])[0])
    return problem.cut(path, seconds, seconds)


@lru_cache(maxsize=64)
def scheduled(kind: ScheduleKind, ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    """The schedule, made once; raises InputError if torch can't run it."""
    return build_schedule(kind, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


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


def forwards_before(schedule: Schedule, rank: int) -> int:
    """How many forwards a rank begins with; all of GPipe's are on the way to its first gradient."""
    if schedule.kind is ScheduleKind.GPIPE:
        return 1
    actions = schedule.actions(rank)
    return next(index for index, action in enumerate(actions) if action.kind is not ActionKind.FORWARD)


def mean_flight(schedule: Schedule) -> float:
    """How many micro-batches a stage keeps at once, on the average stage."""
    kept = schedule.stages_per_rank
    most = (max(sum(each[:kept]) for each in (first, *later)) for first, later in flights(schedule))
    return sum(most) / schedule.stages


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True, slots=True)
class _Mixes:
    """Of one stage what `Mix` holds, in tables [p, q]."""

    lean: NDArray[np.intp]
    rich: NDArray[np.intp]
    share: Table

    @staticmethod
    def under(cap: float, nbytes: NDArray[np.float64], seconds: NDArray[np.float64]) -> _Mixes:
        """From bytes and seconds [level, p, q]; the smallest level where none fits."""
        fits = nbytes <= cap
        fastest = np.where(fits, seconds, np.inf).argmin(axis=0)
        lean = np.where(fits.any(axis=0), fastest, nbytes.argmin(axis=0))
        room, base = cap - _at(nbytes, lean), _at(seconds, lean)
        beyond = np.where(fits, np.inf, nbytes - cap + room).clip(
            min=1.0
        )  # bytes from the leaner level to it
        share = (room / beyond).clip(min=0.0)
        rich = (share * (base - seconds)).argmax(axis=0)
        gains = _at(share * (base - seconds), rich) > 0
        return _Mixes(lean, np.where(gains, rich, lean), np.where(gains, _at(share, rich), 0.0))

    def of(self, tables: NDArray[np.float64]) -> Table:
        """What lies between the two levels of `tables` [level, p, q]."""
        lean = _at(tables, self.lean)
        return lean + self.share * (_at(tables, self.rich) - lean)

    def at(self, p: int, q: int) -> Mix:
        """That of one stage."""
        return Mix(int(self.lean[p, q]), int(self.rich[p, q]), float(self.share[p, q]))


def _at(tables: NDArray[np.float64], level: NDArray[np.intp]) -> Table:
    found: Table = np.take_along_axis(tables, level[None], axis=0)[0]
    return found


@dataclass(slots=True)
class _Problem:
    """The tables of the module's docstring for one schedule."""

    levels: Sequence[Intervals]
    schedule: Schedule
    cap: int | None
    shares: Shares | None = None  # to bound what is computed again, instead of choosing it
    table: Intervals = field(init=False)  # what all levels have in common
    mixes: list[_Mixes] = field(init=False)
    backward: list[Table] = field(init=False)  # the input gradients' part, with what is computed again
    kept: list[Table] = field(init=False)
    working: list[Table] = field(init=False)
    early: list[Table] = field(init=False)
    allowed: list[Table] = field(init=False)  # 0 where a stage fits, infinity elsewhere
    least: list[Table] = field(init=False)  # Q
    onward: list[Row] = field(init=False)  # the least largest Q from a cut on
    busy: list[Table] = field(init=False)
    bound: float = field(init=False)

    def __post_init__(self) -> None:
        split = self.schedule.kind in SPLIT_BACKWARD
        self.levels = [level.scheduled(split=split) for level in self.levels]
        self.table = table = self.levels[0]
        stages = self.schedule.stages
        self.choose_levels()
        if self.shares is not None and self.cap is not None:
            self.backward = [self.at_least(stage, self.shares, self.cap) for stage in range(stages)]
        void = np.tril(np.full_like(table.forward, np.inf))
        self.allowed = [
            void if self.cap is None or self.shares else void + np.where(nbytes > self.cap, np.inf, 0.0)
            for nbytes in map(self.stage_bytes, range(stages))
        ]
        both = table.forward + table.weight_gradient
        if self.late:
            both = both + table.send[:, None] + table.send_back[None, :]
        self.busy = [both + self.backward[stage] for stage in range(stages)]
        self.least = self.undercut()
        self.onward = _bottleneck(self.least)
        self.bound = max(float(self.onward[0][0]), self.share())

    def choose_levels(self) -> None:
        """For every stage that could be, the fastest levels that fit, or the smallest; of a rank's memory
        each of its stages has its part."""
        stages = range(self.schedule.stages)
        if len(self.levels) == 1 or self.cap is None:
            zeros = np.zeros_like(self.table.forward)
            self.mixes = [_Mixes(zeros.astype(np.intp), zeros.astype(np.intp), zeros)] * len(stages)
            self.backward = [self.table.input_gradient] * len(stages)
            self.kept = [self.with_output(stage, self.table.kept) for stage in stages]
            self.working, self.early = [self.table.working] * len(stages), [self.table.early] * len(stages)
            return
        backward, inside, working, early = (
            np.stack([getattr(each, name) for each in self.levels])
            for name in ("input_gradient", "kept", "working", "early")
        )
        self.mixes, self.backward, self.kept, self.working, self.early = [], [], [], [], []
        for stage in stages:
            kept = np.stack([self.with_output(stage, each) for each in inside])
            nbytes = np.stack(
                [self.bytes_of(stage, *each) for each in zip(kept, working, early, strict=True)]
            )
            mixes = _Mixes.under(self.cap * self.part(stage), nbytes, backward)
            self.mixes.append(mixes)
            for chosen, tables in (
                (self.backward, backward),
                (self.kept, kept),
                (self.working, working),
                (self.early, early),
            ):
                chosen.append(mixes.of(tables))

    def at_least(self, stage: int, shares: Shares, cap: int) -> Table:
        """Of a stage the seconds for gradients of inputs with the least that has to be computed again."""
        places, worth = np.asarray(self.table.places), shares.spared > 0
        always = self.lasting(stage) - self.table.gradients
        excess = self.with_output(stage, self.table.kept) + (always - cap) / self.flight(stage)
        prices = shares.seconds[worth] / shares.spared[worth]
        found = np.zeros_like(excess)
        for price in np.unique(np.quantile(prices, QUANTILES)) if worth.any() else ():
            idle = np.maximum(0.0, price * shares.spared - shares.seconds)
            before = np.cumsum([0.0, *idle])[places]
            found = np.maximum(found, price * excess - (before[None, :] - before[:, None]))
        return self.table.input_gradient + np.triu(found, 1)

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
        forward, hop = table.forward, np.zeros_like(table.forward)
        backs = [each + (table.weight_gradient if self.whole else 0.0) for each in self.backward]
        if self.late:
            forward, backs = (
                forward + table.send[:, None],
                [back + table.send_back[None, :] for back in backs],
            )
        else:
            hop = self.hops(table.send)[:, None] + self.hops(table.send_back)[:, None]
        ahead = self.heads([forward] * self.schedule.stages, self.hops(table.send))
        behind = self.heads(backs, self.hops(table.send_back)) if self.whole else None
        after = self.tails([forward + back + hop for back in backs])
        found = []
        for stage in range(self.schedule.stages):
            begun = ahead[stage][:, None] + count * self.busy[stage]
            bounds = [begun + table.sync + table.update]
            home = behind[stage][:, None] if behind is not None else 0.0
            bounds.append(begun + home)
            if self.schedule.stages_per_rank == 1:
                waiting, away = forwards_before(self.schedule, stage) - 1, after[stage + 1][None, :]
                bounds.append(begun - waiting * forward + away + home)
                bounds.append(
                    ahead[stage][:, None] + self.twice_away(stage, forward, backs[stage], away) + home
                )
            found.append(np.maximum.reduce(bounds) + self.allowed[stage])
        return found

    def hops(self, row: Row) -> Row:
        """Seconds of hops at cuts where they hold up a chain of stages beside what `busy` has; none
        where stages may lie on one rank."""
        return np.zeros_like(row) if self.late or self.schedule.kind.is_v else row

    def twice_away(self, rank: int, forward: Table, back: Table, away: Row) -> Table:
        """Seconds from a rank's first action to its last backward along the first micro-batch to the last
        stage and back, the rank's own actions up to its last forward, and that one's way; 0 if all forwards
        come first. `away` is what later stages take forward and back."""
        kinds = [action.kind for action in self.schedule.actions(rank)]
        first = next(index for index, kind in enumerate(kinds) if kind is not ActionKind.FORWARD)
        last = max(index for index, kind in enumerate(kinds) if kind is ActionKind.FORWARD)
        if last < first:
            return np.zeros_like(forward)
        weights, own = self.table.weight_gradient, Counter(kinds[first : last + 1])
        between = own[ActionKind.FORWARD] * forward + own[ActionKind.WEIGHT_GRADIENT] * weights
        between = between + own[ActionKind.INPUT_GRADIENT] * back
        between = between + own[ActionKind.BACKWARD] * (back if self.whole else back + weights)
        found: Table = forward + away + between + away + back
        return found

    def heads(self, seconds: Sequence[Table], hop: Row) -> list[Row]:
        """For each stage and place the least sum of `seconds` of the stages before, and their hops."""
        found = [np.full(len(self.table.places), np.inf)]
        found[0][0] = 0.0
        for stage in range(self.schedule.stages - 1):
            step = found[-1][:, None] + seconds[stage] + self.allowed[stage]
            found.append(step.min(axis=0) + hop)
        return found

    def tails(self, seconds: Sequence[Table]) -> list[Row]:
        """For each stage and place the least sum of `seconds` of it and the stages behind."""
        last = np.full(len(self.table.places), np.inf)
        last[-1] = 0.0
        found = [last]
        for stage in reversed(range(self.schedule.stages)):
            found.append((seconds[stage] + self.allowed[stage] + found[-1][None, :]).min(axis=1))
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

    def with_output(self, stage: int, kept: Table) -> Table:
        """What a micro-batch in flight keeps, with what it sent, where that doesn't last longer."""
        return kept if self.is_sent_late(stage) else np.triu(kept + self.table.received[None, :], 1)

    def is_sent_late(self, stage: int) -> bool:
        """Whether what a stage sends to the next one leaves at some time, while the rank goes on."""
        schedule = self.schedule
        if self.late or not 0 <= stage < schedule.stages - 1:
            return False
        return schedule.rank_of(stage) != schedule.rank_of(stage + 1)

    def stage_bytes(self, stage: int) -> Table:
        """The peak of a rank with this one stage alone."""
        return self.bytes_of(stage, self.kept[stage], self.working[stage], self.early[stage])

    def bytes_of(self, stage: int, kept: Table, working: Table, early: Table) -> Table:
        table, rank = self.table, self.schedule.rank_of(stage)
        own = [each for each in range(self.schedule.stages) if self.schedule.rank_of(each) == rank]
        place, count = own.index(stage), len(own)
        first, later = flights(self.schedule)[rank]
        peak = first[place] * kept + first[count + place] * table.held + early - table.gradients
        for counts in later:
            peak = np.maximum(peak, counts[place] * kept + counts[count + place] * table.held + working)
        return np.triu(self.lasting(stage) + peak, 1)

    def part(self, stage: int) -> float:
        """Of what its rank keeps when that is most."""
        rank = self.schedule.rank_of(stage)
        own = [each for each in range(self.schedule.stages) if self.schedule.rank_of(each) == rank]
        first, later = flights(self.schedule)[rank]
        most = max((counts[: len(own)] for counts in (first, *later)), key=sum)
        return most[own.index(stage)] / sum(most)

    def flight(self, stage: int) -> int:
        """How many micro-batches the stage keeps at once."""
        rank = self.schedule.rank_of(stage)
        own = [each for each in range(self.schedule.stages) if self.schedule.rank_of(each) == rank]
        first, later = flights(self.schedule)[rank]
        return max(counts[own.index(stage)] for counts in (first, *later))

    def rank_bytes(self, paths: Paths) -> NDArray[np.float64]:
        """Peaks [cut, rank], all stages of a rank together."""
        starts, stops = paths[:, :-1], paths[:, 1:]
        stages = range(self.schedule.stages)
        lasting = self.pick([self.lasting(stage) for stage in stages], paths)
        kept, working, early = (self.pick(each, paths) for each in (self.kept, self.working, self.early))
        gradients, held = self.table.gradients[starts, stops], self.table.held[starts, stops]
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

    def pick(self, tables: Sequence[Table], paths: Paths) -> NDArray[np.float64]:
        """Of each stage's own table its entry [cut, stage]."""
        return np.stack(
            [table[paths[:, stage], paths[:, stage + 1]] for stage, table in enumerate(tables)], axis=1
        )

    # -- time -----------------------------------------------------------------------------------------

    def costs(self, paths: Paths) -> CutCosts:
        table, starts, stops = self.table, paths[:, :-1].T, paths[:, 1:].T
        return CutCosts(
            forward=table.forward[starts, stops],
            input_gradient=self.pick(self.backward, paths).T,
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
                kept=int(self.kept[stage][p, q]),
                kept_for_weight=int(self.kept[stage][p, q] + table.held[p, q]),
                working=int(self.working[stage][p, q]),
                gradients=int(table.gradients[p, q]),
                early=int(self.early[stage][p, q]),
            )
            for stage, (p, q) in enumerate(zip(starts, stops, strict=True))
        )

    def cut(self, path: NDArray[np.intp], seconds: float, bound: float) -> Cut:
        return Cut(
            starts=tuple(self.table.places[place] for place in path[:-1]),
            seconds=seconds,
            bound=bound,
            places=len(self.table.places) - 1,
            mixes=tuple(mixes.at(path[stage], path[stage + 1]) for stage, mixes in enumerate(self.mixes)),
            stages=self.stage_costs(path),
            stage_bytes=tuple(
                int(self.stage_bytes(stage)[path[stage], path[stage + 1]]) for stage in range(len(path) - 1)
            ),
            rank_bytes=tuple(int(nbytes) for nbytes in self.rank_bytes(path[None])[0]),
        )

    # -- the search -----------------------------------------------------------------------------------

    def solve(self, *, beat: float = math.inf) -> Cut:
        """The best cut; the search ends where it starts if that is far above `beat` seconds."""
        stages, places = self.schedule.stages, len(self.table.places) - 1
        if stages > places:
            raise InputError(
                where="stages",
                found=f"{stages} stages for {places} places to begin one",
                wanted="at most one for each operator",
                remedy="use fewer stages",
            )
        starts = self.starts()
        if not starts:
            raise _infeasible(self.levels, self.schedule, self.cap or 0)
        best, proven = starts[0], False
        if best[1] <= beat * HOPELESS:
            best, proven = self.prove(min(map(self.descend, starts), key=lambda each: each[1]))
        path, seconds = best
        return self.cut(path, seconds, seconds if proven else min(seconds, self.bound))

    @property
    def actions(self) -> int:
        """About so many does the schedule have."""
        return 2 * self.schedule.stages * self.schedule.micro_batches

    def starts(self) -> list[tuple[NDArray[np.intp], float]]:
        """The fastest of the paths with the least sum of seconds under some thresholds on Q; where ranks have
        several stages, which Q looks at one by one, also of those under some on a stage's seconds."""
        if not math.isfinite(self.onward[0][0]):
            return []
        found = [self.shortest(self.least, limit * self.onward[0][0]) for limit in THRESHOLDS]
        if self.schedule.stages_per_rank > 1:
            table = self.table
            alike = table.forward + table.input_gradient + table.weight_gradient
            even = [alike + np.tril(np.full_like(alike, np.inf))] * self.schedule.stages
            longest = float(_bottleneck(even)[0][0])
            found += [self.shortest(even, limit * longest) for limit in THRESHOLDS]
            if self.cap is not None:
                parts = (self.cap * part // 100 for part in (60, 50, 45))
                found += [self.shortest(self.least, math.inf, nbytes=part) for part in parts]
        paths = np.unique(np.stack([path for path in found if path is not None]), axis=0)
        seconds = self.seconds(paths)
        few = np.argsort(seconds, kind="stable")[: STARTS if self.schedule.stages_per_rank > 1 else 1]
        return [(paths[index], float(seconds[index])) for index in few if math.isfinite(seconds[index])]

    def shortest(
        self, seconds: Sequence[Table], limit: float, *, nbytes: float | None = None
    ) -> NDArray[np.intp] | None:
        """The path with the least sum of seconds whose stages take at most `limit` by their tables of
        `seconds`, and at most `nbytes` by themselves; None if there is none."""
        stages, size = self.schedule.stages, len(self.table.places)
        count, ends = self.schedule.micro_batches, self.table.sync + self.table.update
        best = np.full(size, np.inf)
        best[-1] = 0.0
        following = []
        for stage in reversed(range(stages)):
            weighed = count * self.busy[stage] + ends
            step = np.where(seconds[stage] <= limit * (1 + 1e-12), weighed, np.inf)
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


def _bottleneck(seconds: Sequence[Table]) -> list[Row]:
    """For each stage and place the least that the longest stage from there on can take."""
    last = np.full(seconds[0].shape[0], np.inf)
    last[-1] = 0.0
    found = [last]
    for table in reversed(seconds):
        found.append(np.maximum(table, found[-1][None, :]).min(axis=1))
    return found[::-1]


def _fastest(paths: Paths, seconds: NDArray[np.float64]) -> tuple[NDArray[np.intp], float] | None:
    index = int(seconds.argmin())
    return (paths[index], float(seconds[index])) if math.isfinite(seconds[index]) else None


def least_bytes(tables: Sequence[Intervals], schedule: Schedule) -> int:
    """The least cap under which each stage fits by itself: all there is to it with one stage per rank."""
    problem = _Problem(tables, schedule, 0)  # in which every stage takes the smallest level
    best = np.full(len(problem.table.places), np.inf)
    best[-1] = 0.0
    void = np.tril(np.full_like(problem.table.forward, np.inf))
    for stage in reversed(range(schedule.stages)):
        best = np.maximum(problem.stage_bytes(stage) + void, best[None, :]).min(axis=1)
    return int(best[0])


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
