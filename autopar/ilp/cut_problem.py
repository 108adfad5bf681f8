"""What cuts of a program into stages cost under one schedule: tables over pairs of places, for each stage.

**Memory.** Each rank's bytes stay below the cap: state, the batch, what micro-batches in flight keep, what
was sent and may not have arrived, and the most that an operator needs beside that. Where parts may be
computed again, a table stands for each level of that (recompute.py). Each stage takes the fastest level that
fits, which depends on how many micro-batches it keeps, and for as large a share as still fits a faster one:
levels are few, but blocks in a stage are several, so what lies between two is near. Stages of one rank part
its memory by what they would take if all were alike.

**Bound.** Some paths through the actions are known in advance. With t the seconds for which a stage keeps
its rank busy for one micro-batch, h_k[p] the least that stages before it can take forward, b_k[p] backward,
r_k[p] the least that it takes from a cut p on through all later stages and back, no step of which [p, q)
is stage k takes less than

    Q_k[p,q] = max  h_k[p] + M t + E                       all its work, after the first micro-batch came
                    h_k[p] + M t + b_k[p]                  ... and the last gradient went, if B is not split
                    h_k[p] + M t - (w - 1) F + r_(k+1)[q]  it waits for its first gradient, after w forwards
                    h_k[p] + (M - w + 1) t + 2 r_(k+1)[q]  and for that of its last forward, which comes later
                             (+ b_k[p] if B is not split; one stage per rank)

so min over paths of max_k Q_k, found by dynamic programming from the end, bounds all cuts from below; and so
does the least sum over ranks of the first of them, or of the second, divided by the ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from autopar.clock import CutCosts, step_seconds
from autopar.core.schedule import SPLIT_BACKWARD, ActionKind, Schedule, ScheduleKind
from autopar.core.timeline import StageCost
from autopar.cost.again import Shares
from autopar.cost.intervals import Intervals
from autopar.cost.rectangles import Row, Table
from autopar.ilp.flights import endings, flights, forwards_before, in_flight, of_one, stages_of

QUANTILES = tuple(step / 16 for step in range(17))  # of seconds per byte, tried as a price

_WHOLE = ("kept", "working", "early")  # of what a stage holds, where no backward is split
_SPLIT = (*_WHOLE, "held", "half", "half_early")

Path = NDArray[np.intp]  # [stage + 1]: numbers of places
Paths = NDArray[np.intp]  # [cut, stage + 1]


@dataclass(frozen=True, slots=True)
class Mix:
    """The levels of a stage: `rich` for a `share` of it at its end, and `lean` before."""

    lean: int
    rich: int
    share: float


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
        beyond = np.where(fits, np.inf, nbytes - cap + room).clip(min=1.0)  # bytes from the leaner level
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


def _each(tables: Sequence[Table], function: Callable[[Table], Table]) -> list[Table]:
    """Of every table what the function makes of it; what is the same table stays one."""
    distinct = {id(table): table for table in tables}
    made = {number: function(table) for number, table in distinct.items()}
    return [made[id(table)] for table in tables]


@dataclass(frozen=True, slots=True)
class Holds:
    """Bytes of one stage that recomputing changes, in tables [p, q]: `kept` by a micro-batch in flight, with
    what it sent, and `held` by one between the halves of a split backward; beside that an action needs
    `working` or, before the first gradients, `early`, and a first half `half` or `half_early`."""

    kept: Table
    held: Table
    working: Table
    early: Table
    half: Table
    half_early: Table

    def mixed(self, mixes: _Mixes, levels: Mapping[str, NDArray[np.float64]]) -> Holds:
        """What lies between the levels' tables [level, p, q]; those without are this one's."""
        return replace(self, **{name: mixes.of(tables) for name, tables in levels.items()})


@dataclass(slots=True)
class CutProblem:
    """The tables for one schedule, under a cap or without; `shares` bound what has to be computed again
    instead of choosing it."""

    levels: Sequence[Intervals]
    schedule: Schedule
    cap: int | None
    shares: Shares | None = None
    table: Intervals = field(init=False)  # what all levels have in common
    lasting: list[Table] = field(init=False)  # bytes that are there all step
    mixes: list[_Mixes] = field(init=False)
    backward: list[Table] = field(init=False)  # the input gradients' part, with what is computed again
    holds: list[Holds] = field(init=False)
    allowed: list[Table] = field(init=False)  # 0 where a stage fits, infinity elsewhere
    ahead: list[Row] = field(init=False)  # h
    least: list[Table] = field(init=False)  # Q
    onward: list[Row] = field(init=False)  # the least largest Q from a cut on
    busy: list[Table] = field(init=False)
    bound: float = field(init=False)

    def __post_init__(self) -> None:
        self.levels = [level.scheduled(self.schedule.kind) for level in self.levels]
        self.table = table = self.levels[0]
        stages = self.schedule.stages
        self.lasting = [self.always_there(stage) for stage in range(stages)]
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
        self.busy = _each(self.backward, lambda back: both + back)
        self.least = self.undercut()
        self.onward = bottleneck(self.least)
        self.bound = max(float(self.onward[0][0]), self.share())

    def choose_levels(self) -> None:
        """For every stage that could be, the fastest levels that fit, or the smallest; of a rank's memory
        each of its stages has its part."""
        stages = range(self.schedule.stages)
        common = self.holds_of(self.table)
        if len(self.levels) == 1 or self.cap is None:
            zeros = np.zeros_like(self.table.forward)
            self.mixes = [_Mixes(zeros.astype(np.intp), zeros.astype(np.intp), zeros)] * len(stages)
            self.backward = [self.table.input_gradient] * len(stages)
            self.holds = [common] * len(stages)
            return
        each = [self.holds_of(level) for level in self.levels]
        names = _SPLIT if self.schedule.kind in SPLIT_BACKWARD else _WHOLE
        levels = {name: np.stack([getattr(holds, name) for holds in each]) for name in names}
        backward = np.stack([level.input_gradient for level in self.levels])
        self.mixes, self.backward, self.holds = [], [], []
        for stage in stages:
            nbytes = np.stack([self.bytes_of(stage, holds) for holds in each])
            mixes = _Mixes.under(self.cap * self.part(stage), nbytes, backward)
            self.mixes.append(mixes)
            self.backward.append(mixes.of(backward))
            self.holds.append(common.mixed(mixes, levels))

    def holds_of(self, level: Intervals) -> Holds:
        """Those of every stage at one level."""
        halves = level.halves
        kept = self.with_output(level.kept)
        return Holds(kept, halves.held, level.working, level.early, halves.working, halves.early)

    def at_least(self, stage: int, shares: Shares, cap: int) -> Table:
        """Of a stage the seconds for gradients of inputs with the least that has to be computed again."""
        places, worth = np.asarray(self.table.places), shares.spared > 0
        always = self.lasting[stage] - self.table.gradients
        excess = self.with_output(self.table.kept) + (always - cap) / self.flight(stage)
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
        self.ahead = ahead = self.heads([forward] * self.schedule.stages, self.hops(table.send))
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
        """The slowest rank takes at least as long as the average one: until its first micro-batch comes, for
        all its work, and then for its updates or until its last gradient is at the first stage."""
        table, ranks = self.table, self.schedule.ranks
        ends = table.update + (table.sync if self.schedule.stages_per_rank == 1 else 0.0)
        first, last = [], []
        for stage, busy in enumerate(self.busy):
            later = max(0, ranks - 1 - stage)  # ranks whose first stage comes after this one
            work = self.schedule.micro_batches * busy + later * table.forward
            first.append(work + ends)
            last.append(work + later * (self.backward[stage] + table.weight_gradient) if self.whole else work)
        return max(float(self.tails(each)[0][0]) for each in (first, last)) / ranks

    # -- memory ---------------------------------------------------------------------------------------

    def always_there(self, stage: int) -> Table:
        """Of a stage: its state, on the first of a rank's stages the batch, and outputs that it sent where no
        gradient comes back to prove their arrival."""
        table, schedule = self.table, self.schedule
        batch = schedule.micro_batches * table.batch if stage < schedule.ranks else 0.0
        unproved = np.where(table.received_back == 0, table.received, 0.0) * self.is_sent_late(stage)
        return np.triu(table.state + batch + schedule.micro_batches * unproved[None, :], 1)

    def with_output(self, kept: Table) -> Table:
        """What a micro-batch in flight keeps, with what it sent."""
        return np.triu(kept + self.table.received[None, :], 1)

    def is_sent_late(self, stage: int) -> bool:
        """Whether what a stage sends to the next one leaves at some time, while the rank goes on."""
        schedule = self.schedule
        if self.late or not 0 <= stage < schedule.stages - 1:
            return False
        return schedule.rank_of(stage) != schedule.rank_of(stage + 1)

    def stage_bytes(self, stage: int) -> Table:
        """The peak of a rank with this one stage alone."""
        return self.bytes_of(stage, self.holds[stage])

    def bytes_of(self, stage: int, holds: Holds) -> Table:
        table, rank = self.table, self.schedule.rank_of(stage)
        place = stages_of(self.schedule, rank).index(stage)
        peak = np.full_like(holds.kept, -np.inf)
        for moments, beside in zip(flights(self.schedule)[rank], self.beside(holds), strict=True):
            for count, half, back in of_one(moments, place):
                held = count * holds.kept + half * holds.held + back * table.received_back[:, None]
                peak = np.maximum(peak, held + beside)
        (ending,) = of_one((endings(self.schedule)[rank][place],), place)
        peak = np.maximum(peak, table.summing + ending[2] * table.received_back[:, None])
        return np.triu(self.lasting[stage] + peak, 1)

    def beside(self, holds: Holds) -> tuple[Table, Table, Table, Table]:
        """What is needed in the moments of `Flights` beside what is kept and the state."""
        missing = self.table.gradients
        return holds.early - missing, holds.half_early - missing, holds.working, holds.half

    def part(self, stage: int) -> float:
        """Of what its rank holds when that is most, if all stages were alike."""
        own = stages_of(self.schedule, self.schedule.rank_of(stage))
        each = flights(self.schedule)[self.schedule.rank_of(stage)]
        most = max(map(in_flight, each.all()), key=sum)
        held = [self.table.state[0, -1] + count * self.table.kept[0, -1] for count in most]
        return float(held[own.index(stage)] / sum(held)) if sum(held) else 1 / len(own)

    def flight(self, stage: int) -> int:
        """How many micro-batches the stage keeps whole at once."""
        rank = self.schedule.rank_of(stage)
        place = stages_of(self.schedule, rank).index(stage)
        return max(counts[place] for counts in flights(self.schedule)[rank].all())

    def rank_bytes(self, paths: Paths) -> NDArray[np.float64]:
        """Peaks [cut, rank], all stages of a rank together."""
        starts, stops = paths[:, :-1], paths[:, 1:]
        lasting, missing = self.pick(self.lasting, paths), self.table.gradients[starts, stops]
        kept, held, working, early, half, half_early = (
            self.pick([getattr(holds, each.name) for holds in self.holds], paths) for each in fields(Holds)
        )
        back = self.table.received_back[starts]
        found = []
        for rank, each in enumerate(flights(self.schedule)):
            own = stages_of(self.schedule, rank)
            bytes_of_one = np.concatenate([kept[:, own], held[:, own], back[:, own]], axis=1)
            later = missing[:, own].sum(axis=1)
            besides = (early, later), (half_early, later), (working, 0.0), (half, 0.0)
            peaks = [
                (bytes_of_one @ np.asarray(moments, dtype=float).T).max(axis=1)
                + beside[:, own].max(axis=1)
                - absent
                for moments, (beside, absent) in zip(each, besides, strict=True)
                if moments
            ]
            ends = bytes_of_one @ np.asarray(endings(self.schedule)[rank], dtype=float).T
            peaks.append((ends + self.table.summing[starts, stops][:, own]).max(axis=1))
            found.append(lasting[:, own].sum(axis=1) + np.maximum.reduce(peaks))
        return np.stack(found, axis=1)

    def pick(self, tables: Sequence[Table], paths: Paths) -> NDArray[np.float64]:
        """Of each stage's own table its entry [cut, stage]."""
        starts, stops = paths[:, :-1], paths[:, 1:]
        if all(table is tables[0] for table in tables):
            return tables[0][starts, stops]
        return np.stack([table[starts[:, n], stops[:, n]] for n, table in enumerate(tables)], axis=1)

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

    def seconds(self, paths: Paths, below: float = math.inf) -> NDArray[np.float64]:
        """Step times [cut], infinity for those that don't fit and for those whose busiest rank alone takes
        `below` or more."""
        found = np.full(len(paths), np.inf)
        left = np.arange(len(paths))
        if math.isfinite(below):
            left = left[self.rank_seconds(paths).max(axis=1) < below]
        if self.cap is not None:
            left = left[(self.rank_bytes(paths[left]) <= self.cap).all(axis=1)]
        if len(left):
            found[left] = step_seconds(self.schedule, self.costs(paths[left]))
        return found

    def rank_seconds(self, paths: Paths) -> NDArray[np.float64]:
        """Seconds [cut, rank] that each rank's work takes and what must come before it and after it."""
        starts, stops, ranks = paths[:, :-1], paths[:, 1:], self.schedule.ranks
        way = self.table.forward[starts, stops]
        if self.whole:
            way = way + self.pick(self.backward, paths) + self.table.weight_gradient[starts, stops]
        found = np.cumsum(way[:, :ranks], axis=1) - way[:, :ranks]
        busy = self.schedule.micro_batches * self.pick(self.busy, paths)
        for stage in range(self.schedule.stages):
            found[:, self.schedule.rank_of(stage)] += busy[:, stage]
        return found

    def stage_costs(self, path: Path) -> tuple[StageCost, ...]:
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
                lasting=int(self.lasting[stage][p, q] - table.state[p, q]),
                kept=int(holds.kept[p, q]),
                kept_for_weight=int(holds.held[p, q]),
                sent_back=0 if self.late else int(table.received_back[p]),
                working=int(holds.working[p, q]),
                gradients=int(table.gradients[p, q]),
                early=int(holds.early[p, q]),
                halving=int(holds.half[p, q]),
                halving_early=int(holds.half_early[p, q]),
                summing=int(table.summing[p, q]),
            )
            for stage, (p, q, holds) in enumerate(zip(starts, stops, self.holds, strict=True))
        )


def bottleneck(seconds: Sequence[Table]) -> list[Row]:
    """For each stage and place the least that the longest stage from there on can take."""
    last = np.full(seconds[0].shape[0], np.inf)
    last[-1] = 0.0
    found = [last]
    for table in reversed(seconds):
        found.append(np.maximum(table, found[-1][None, :]).min(axis=1))
    return found[::-1]
