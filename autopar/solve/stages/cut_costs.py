"""What cuts of a program into stages cost under one schedule: tables over pairs of places, for each stage.

**Memory.** Each rank's bytes stay below the cap: state, the batch, what micro-batches in flight keep, what
was sent and may not have arrived, and the most that an operator needs beside that. Where operators may be
placed otherwise (mixture.py), or parts recomputed (recompute.py), so that they take less, a table stands
for each level of that. Each stage takes the fastest level that fits, which depends on how many micro-batches
it keeps, and for as large a share as still fits a faster one: levels are few, but blocks in a stage are
several, so what lies between two is near. Stages of one rank part its memory by what they would take if all
were alike.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.core.schedule import ActionKind, Schedule, ScheduleKind
from autopar.core.timeline import StageCost
from autopar.cost.interval_table import Row, Table
from autopar.cost.program.recompute import Shares
from autopar.cost.stages.intervals import Intervals
from autopar.schedules.in_flight import (
    endings,
    flight,
    flights,
    forwards_before,
    in_flight,
    of_one,
    stages_of,
)
from autopar.schedules.simulate_many import CutCosts, step_seconds
from autopar.solve.stages.memory_levels import QUANTILES, LevelTables, MixTables, most_crossing

Made = TypeVar("Made")
Path = NDArray[np.intp]  # [stage + 1]: numbers of places
Paths = NDArray[np.intp]  # [cut, stage + 1]


def _each(function: Callable[..., Made], *parts: Sequence[Any]) -> list[Made]:
    """Results of `function` for the parts of every stage; equal parts share one result."""
    made: dict[tuple[int, ...], Made] = {}
    found = []
    for each in zip(*parts, strict=True):
        key = tuple(map(id, each))
        if key not in made:
            made[key] = function(*each)
        found.append(made[key])
    return found


@dataclass(frozen=True, slots=True)
class Holds:
    """Bytes of one stage beside its state, in tables [p, q]: `saved` by a micro-batch in flight, with
    what it sent, and `held` by one between the halves of a split backward; beside that an action needs
    `working` or, before the first gradients, `early`, and a first half `half` or `half_early`."""

    saved: Table
    held: Table
    working: Table
    early: Table
    half: Table
    half_early: Table


@dataclass(slots=True)
class CutProblem:
    """The tables for one schedule, under a cap or without; `shares` bound what has to be recomputed
    instead of choosing it."""

    levels: Sequence[Intervals]
    schedule: Schedule
    cap: int | None
    shares: Shares | None = None
    table: Intervals = field(init=False)  # of the first level, with what crosses cuts at most
    tables: list[Intervals] = field(init=False)  # of each stage what lies between its levels
    lasting: list[Table] = field(init=False)  # bytes that are there all step
    mixes: list[MixTables] = field(init=False)
    backward: list[Table] = field(init=False)  # the input gradients' part, with what is recomputed
    holds: list[Holds] = field(init=False)
    allowed: list[Table] = field(init=False)  # 0 where a stage fits, infinity elsewhere
    ahead: list[Row] = field(init=False)  # h
    least: list[Table] = field(init=False)  # Q
    onward: list[Row] = field(init=False)  # the least largest Q from a cut on
    busy: list[Table] = field(init=False)
    bound: float = field(init=False)

    def __post_init__(self) -> None:
        self.levels = [level.scheduled(self.schedule.kind) for level in self.levels]
        self.table = table = most_crossing(self.levels)
        stages = self.schedule.stages
        self.choose_levels()
        self.lasting = [self.always_there(stage, each) for stage, each in enumerate(self.tables)]
        self.holds = _each(self.holds_of, self.tables)
        self.backward = _each(lambda each: each.input_gradient, self.tables)
        if self.shares is not None and self.cap is not None and not table.of_ranks:
            self.backward = [self.at_least(stage, self.shares, self.cap) for stage in range(stages)]
        void = np.tril(np.full_like(table.forward, np.inf))
        self.allowed = [self.where_fits(stage, void) for stage in range(stages)]
        self.busy = _each(self.busy_with, self.tables, self.backward)
        self.least = self.undercut()
        self.onward = bottleneck(self.least)
        self.bound = max(float(self.onward[0][0]), self.share())

    def choose_levels(self) -> None:
        """For every stage that could be, the fastest levels that fit, or the smallest; of a rank's memory
        each of its stages has its part."""
        self.mixes, self.tables = [], []
        ranks = [self.schedule.rank_of(stage) for stage in range(self.schedule.stages)]
        if len(self.levels) == 1 or self.cap is None:
            zeros = np.zeros_like(self.table.forward)
            whole = MixTables(zeros.astype(np.intp), zeros.astype(np.intp), zeros)
            self.mixes, self.tables = [whole] * len(ranks), [self.table.on_rank(rank) for rank in ranks]
            return
        count, known = self.schedule.micro_batches, dict[int, Any]()
        for stage, rank in enumerate(ranks):
            levels = [each.on_rank(rank) for each in self.levels]
            if id(levels[0]) not in known:
                between = LevelTables.of(most_crossing(levels), levels)
                seconds = np.stack([count * each.seconds + each.sync + each.update for each in levels])
                known[id(levels[0])] = between, seconds, [self.holds_of(each) for each in levels]
            between, seconds, holds = known[id(levels[0])]
            nbytes = np.stack([self.bytes_of(stage, *each) for each in zip(levels, holds, strict=True)])
            self.mixes.append(MixTables.under(self.caps[rank] * self.part(stage), nbytes, seconds))
            self.tables.append(between.mixed(self.mixes[-1]))

    @property
    def caps(self) -> NDArray[np.float64]:
        """Bytes that a device of each rank may take."""
        room = np.asarray(self.table.room or (0,) * self.schedule.ranks, dtype=float)
        return room + (math.inf if self.cap is None else self.cap)

    def where_fits(self, stage: int, void: Table) -> Table:
        """0 where a stage fits, infinity elsewhere and where `void` has it."""
        if self.cap is None or self.shares:
            return void
        cap = self.caps[self.schedule.rank_of(stage)]
        found: Table = np.where(self.stage_bytes(stage) > cap, np.inf, void)
        return found

    def busy_with(self, table: Intervals, back: Table) -> Table:
        """Seconds for which a stage keeps its rank busy for one micro-batch."""
        both = table.forward + table.weight_gradient
        if self.late:
            both = both + table.send[:, None] + table.send_back[None, :]
        busy: Table = both + back
        return busy

    def holds_of(self, level: Intervals) -> Holds:
        """Bytes that every stage holds at one level."""
        halves = level.halves
        saved = self.with_output(level.saved)
        return Holds(saved, halves.held, level.working, level.early, halves.working, halves.early)

    def at_least(self, stage: int, shares: Shares, cap: int) -> Table:
        """Seconds of a stage for gradients of inputs, with the least that has to be recomputed."""
        places, worth = np.asarray(self.table.places), shares.spared > 0
        always = self.lasting[stage] - self.table.gradients
        excess = self.with_output(self.table.saved) + (always - cap) / flight(self.schedule, stage)
        excess = excess - shares.offload_rate * self.table.forward
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
        """Whether ranks wait for tensors that they receive."""
        return self.schedule.kind in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)

    @property
    def whole(self) -> bool:
        """Whether every backward is one piece, not split into input and weight gradients."""
        return self.late or self.schedule.kind is ScheduleKind.INTERLEAVED

    def undercut(self) -> list[Table]:
        """The bound Q of every stage."""
        table, count = self.table, self.schedule.micro_batches
        hop = np.zeros_like(table.forward)
        forwards = _each(lambda each: each.forward, self.tables)
        backs = _each(self.way_back, self.tables, self.backward)
        if self.late:
            forwards = _each(lambda forward: forward + table.send[:, None], forwards)
            backs = _each(lambda back: back + table.send_back[None, :], backs)
        else:
            hop = self.hops(table.send)[:, None] + self.hops(table.send_back)[:, None]
        self.ahead = ahead = self.heads(forwards, self.hops(table.send))
        behind = self.heads(backs, self.hops(table.send_back)) if self.whole else None
        after = self.tails(_each(lambda forward, back: forward + back + hop, forwards, backs))
        found = []
        for stage, (own, forward) in enumerate(zip(self.tables, forwards, strict=True)):
            begun = ahead[stage][:, None] + count * self.busy[stage]
            bounds = [begun + own.sync + own.update]
            rest = behind[stage][:, None] if behind is not None else 0.0
            bounds.append(begun + rest)
            if self.schedule.stages_per_rank == 1:
                waiting, later = forwards_before(self.schedule, stage) - 1, after[stage + 1][None, :]
                bounds.append(begun - waiting * forward + later + rest)
                bounds.append(
                    ahead[stage][:, None] + self.two_round_trips(stage, forward, backs[stage], later) + rest
                )
            found.append(np.maximum.reduce(bounds) + self.allowed[stage])
        return found

    def way_back(self, table: Intervals, back: Table) -> Table:
        """Seconds until a stage sends a gradient back."""
        return back + table.weight_gradient if self.whole else back

    def hops(self, row: Row) -> Row:
        """Seconds of hops at cuts where they hold up a chain of stages beside what `busy` has; none
        where stages may lie on one rank."""
        return np.zeros_like(row) if self.late or self.schedule.kind.is_v else row

    def two_round_trips(self, rank: int, forward: Table, back: Table, later: Row) -> Table:
        """Seconds from a rank's first action to its last backward, along two micro-batches. The first goes to
        the last stage and back; then come the rank's own actions up to its last forward, and that
        micro-batch's way. 0 if all forwards come first. `later` is the time of later stages, forward and
        back."""
        kinds = [action.kind for action in self.schedule.actions(rank)]
        first = next(index for index, kind in enumerate(kinds) if kind is not ActionKind.FORWARD)
        last = max(index for index, kind in enumerate(kinds) if kind is ActionKind.FORWARD)
        if last < first:
            return np.zeros_like(forward)
        weights, own = self.tables[rank].weight_gradient, Counter(kinds[first : last + 1])
        between = own[ActionKind.FORWARD] * forward + own[ActionKind.WEIGHT_GRADIENT] * weights
        between = between + own[ActionKind.INPUT_GRADIENT] * back
        between = between + own[ActionKind.BACKWARD] * (back if self.whole else back + weights)
        found: Table = forward + later + between + later + back
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
        ranks = self.schedule.ranks
        first, last = [], []
        for stage, (table, busy) in enumerate(zip(self.tables, self.busy, strict=True)):
            ends = table.update + (table.sync if self.schedule.stages_per_rank == 1 else 0.0)
            later = max(0, ranks - 1 - stage)  # ranks whose first stage comes after this one
            work = self.schedule.micro_batches * busy + later * table.forward
            first.append(work + ends)
            last.append(work + later * (self.backward[stage] + table.weight_gradient) if self.whole else work)
        return max(float(self.tails(each)[0][0]) for each in (first, last)) / ranks

    # -- memory ---------------------------------------------------------------------------------------

    def always_there(self, stage: int, table: Intervals) -> Table:
        """Bytes of a stage that are there all step.

        They are its state, on the first of a rank's stages the batch, and outputs that it sent where no
        gradient comes back to prove their arrival.
        """
        schedule, received_back = self.schedule, self.table.received_back
        batch = schedule.micro_batches * table.batch + table.beside if stage < schedule.ranks else 0.0
        unproved = np.where(received_back == 0, self.table.received, 0.0) * self.is_sent_late(stage)
        return np.triu(table.state + batch + schedule.micro_batches * unproved[None, :], 1)

    def with_output(self, saved: Table) -> Table:
        """Bytes that a micro-batch in flight keeps, the output that it sent included."""
        return np.triu(saved + self.table.received[None, :], 1)

    def is_sent_late(self, stage: int) -> bool:
        """Whether a stage's send to the next one travels while its rank goes on."""
        schedule = self.schedule
        if self.late or not 0 <= stage < schedule.stages - 1:
            return False
        return schedule.rank_of(stage) != schedule.rank_of(stage + 1)

    def stage_bytes(self, stage: int) -> Table:
        """The peak of a rank with this one stage alone."""
        return self.bytes_of(stage, self.tables[stage], self.holds[stage])

    def bytes_of(self, stage: int, table: Intervals, holds: Holds) -> Table:
        """The peak of a rank with one stage alone, had the stage these tables."""
        rank, received_back = self.schedule.rank_of(stage), self.table.received_back
        place = stages_of(self.schedule, rank).index(stage)
        peak, held = np.full_like(holds.saved, -np.inf), np.empty_like(holds.saved)
        for moments, beside in zip(flights(self.schedule)[rank], self.beside(table, holds), strict=True):
            for count, half, back in of_one(moments, place):
                np.multiply(holds.saved, count, out=held)
                if half:
                    held += half * holds.held
                if back:
                    held += back * received_back[:, None]
                held += beside
                np.maximum(peak, held, out=peak)
        (ending,) = of_one((endings(self.schedule)[rank][place],), place)
        peak = np.maximum(peak, table.summing + ending[2] * received_back[:, None])
        return np.triu(self.always_there(stage, table) + peak, 1)

    def beside(self, table: Intervals, holds: Holds) -> tuple[Table, Table, Table, Table]:
        """Bytes in each moment of `Flights` beside saved tensors and the state."""
        missing = table.gradients
        return holds.early - missing, holds.half_early - missing, holds.working, holds.half

    def part(self, stage: int) -> float:
        """A stage's share of what its rank holds when that is most, if all stages were alike."""
        own = stages_of(self.schedule, self.schedule.rank_of(stage))
        each = flights(self.schedule)[self.schedule.rank_of(stage)]
        most = max(map(in_flight, each.all()), key=sum)
        held = [self.table.state[0, -1] + count * self.table.saved[0, -1] for count in most]
        return float(held[own.index(stage)] / sum(held)) if sum(held) else 1 / len(own)

    def rank_bytes(self, paths: Paths) -> NDArray[np.float64]:
        """Peak bytes [cut, rank], all stages of a rank together."""
        starts = paths[:, :-1]
        lasting = self.pick(self.lasting, paths)
        missing, summing = (
            self.pick([getattr(table, name) for table in self.tables], paths)
            for name in ("gradients", "summing")
        )
        saved, held, working, early, half, half_early = (
            self.pick([getattr(holds, each.name) for holds in self.holds], paths) for each in fields(Holds)
        )
        back = self.table.received_back[starts]
        found = []
        for rank, each in enumerate(flights(self.schedule)):
            own = stages_of(self.schedule, rank)
            bytes_of_one = np.concatenate([saved[:, own], held[:, own], back[:, own]], axis=1)
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
            peaks.append((ends + summing[:, own]).max(axis=1))
            found.append(lasting[:, own].sum(axis=1) + np.maximum.reduce(peaks))
        return np.stack(found, axis=1)

    def pick(self, tables: Sequence[Table], paths: Paths) -> NDArray[np.float64]:
        """Read each stage's entry [cut, stage] from its own table."""
        starts, stops = paths[:, :-1], paths[:, 1:]
        if all(table is tables[0] for table in tables):
            return tables[0][starts, stops]
        return np.stack([table[starts[:, n], stops[:, n]] for n, table in enumerate(tables)], axis=1)

    # -- time -----------------------------------------------------------------------------------------

    def costs(self, paths: Paths) -> CutCosts:
        forward, weights, sync, update = (
            self.pick([getattr(table, name) for table in self.tables], paths).T
            for name in ("forward", "weight_gradient", "sync", "update")
        )
        return CutCosts(
            forward=forward,
            input_gradient=self.pick(self.backward, paths).T,
            weight_gradient=weights,
            send_output=self.hop_seconds(paths[:, 1:].T, ahead=True),
            send_gradient=self.hop_seconds(paths[:, :-1].T, ahead=False),
            sync=sync,
            update=update,
        )

    def hop_seconds(self, cuts: Paths, *, ahead: bool) -> NDArray[np.float64]:
        """Seconds [stage, cut] of what crosses the cut after each stage, or before it for gradients."""
        table = self.table
        if not table.hops:
            found: NDArray[np.float64] = (table.send if ahead else table.send_back)[cuts]
            return found
        rows = [pair[0 if ahead else 1] for pair in table.hops]
        nothing = np.zeros_like(table.send)
        of_stages = [*rows, nothing] if ahead else [nothing, *rows]
        return np.stack([row[places] for row, places in zip(of_stages, cuts, strict=True)])

    def seconds(self, paths: Paths, below: float = math.inf) -> NDArray[np.float64]:
        """Step times [cut], infinity for those that don't fit and for those whose busiest rank alone takes
        `below` or more."""
        found = np.full(len(paths), np.inf)
        left = np.arange(len(paths))
        if math.isfinite(below):
            left = left[self.rank_seconds(paths).max(axis=1) < below]
        if self.cap is not None:
            left = left[(self.rank_bytes(paths[left]) <= self.caps).all(axis=1)]
        if len(left):
            found[left] = step_seconds(self.schedule, self.costs(paths[left]))
        return found

    def rank_seconds(self, paths: Paths) -> NDArray[np.float64]:
        """Seconds [cut, rank] that each rank's work takes and what must come before it and after it."""
        ranks = self.schedule.ranks
        way = self.pick([table.forward for table in self.tables], paths)
        if self.whole:
            way = way + self.pick(self.backward, paths)
            way = way + self.pick([table.weight_gradient for table in self.tables], paths)
        found = np.cumsum(way[:, :ranks], axis=1) - way[:, :ranks]
        busy = self.schedule.micro_batches * self.pick(self.busy, paths)
        for stage in range(self.schedule.stages):
            found[:, self.schedule.rank_of(stage)] += busy[:, stage]
        return found

    def stage_costs(self, path: Path) -> tuple[StageCost, ...]:
        costs = self.costs(path[None])
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
                kept=int(holds.saved[p, q]),
                kept_for_weight=int(holds.held[p, q]),
                sent_back=0 if self.late else int(self.table.received_back[p]),
                working=int(holds.working[p, q]),
                gradients=int(table.gradients[p, q]),
                early=int(holds.early[p, q]),
                halving=int(holds.half[p, q]),
                halving_early=int(holds.half_early[p, q]),
                summing=int(table.summing[p, q]),
            )
            for stage, (p, q, table, holds) in enumerate(
                zip(starts, stops, self.tables, self.holds, strict=True)
            )
        )


def bottleneck(seconds: Sequence[Table]) -> list[Row]:
    """For each stage and place the least that the longest stage from there on can take."""
    last = np.full(seconds[0].shape[0], np.inf)
    last[-1] = 0.0
    found = [last]
    for table in reversed(seconds):
        found.append(np.maximum(table, found[-1][None, :]).min(axis=1))
    return found[::-1]
