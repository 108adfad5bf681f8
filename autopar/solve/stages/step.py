"""An assignment as a whole training step: its micro-batches, and its stages where there are several.

One group of ranks does M micro-batches one after the other and then what is done once: M t + E. With
stages the cut is sought for this one assignment (stages.py). Where memory asks for it, stages choose among
levels: parts are recomputed, and under schedules that don't split backward what hides is moved to the
host besides.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.core.costs import LinkLike
from autopar.core.offload import Offload
from autopar.core.pipeline import inseparable
from autopar.core.recompute import Recompute, Segment
from autopar.core.schedule import SPLIT_BACKWARD, Schedule
from autopar.core.timeline import StageCost
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.recompute import shares
from autopar.cost.program.step import StepCost
from autopar.cost.stages.intervals import Intervals, choose_places, crossing_bytes, intervals
from autopar.errors import InfeasibleError
from autopar.solve.memory.offload import moving_in_stages, overlapped_of_stages
from autopar.solve.memory.recompute import ladder
from autopar.solve.program.solution import Solution, check_cutoff
from autopar.solve.stages.cut_search import (
    MOST_CUT_PLACES,
    Cut,
    ScheduledCut,
    best,
    cut_at,
    cuts,
    recomputing_bound,
)
from autopar.solve.stages.memory_levels import Mix
from autopar.solve.stages.mixture import Mixture, is_placed_alike
from autopar.solve.stages.order_tables import OrderTables
from autopar.units import show_bytes

RUNGS = 5  # levels of recomputing, beside none, among which stages choose
CAP_TRIES = 3  # of caps for tables, where the replay finds more
LOWER = 0.99  # of the cap, beside what was too much
PROBES = 4  # of where in a stage the level changes


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `seconds` with a lower bound: on all cuts for this assignment, and on all assignments by the
    seconds of all stages together. Of these alone the bound is larger by 1 / `share`; if memory had no end
    the assignment would take `free` seconds. Bytes are those of the fullest rank.

    To call the operators of the average rank takes a GPU's host `calls`, and no step less. Where operators
    are few another assignment may be cut more evenly: there joint_bound.py bounds the plan."""

    solution: Solution
    cost: StepCost
    seconds: float
    bound: float
    peak_bytes: int
    state_bytes: int
    free: float
    share: float = 1.0
    calls: float = 0.0
    cut: Cut | None = None
    schedule: Schedule | None = None
    filling: tuple[StageCost, ...] = ()  # for which the schedule's waits are filled, if they are
    passed: Step | None = None  # one whose equal blocks are unlike, passed over as it promises hardly less

    @property
    def recomputes(self) -> bool:
        return bool(self.solution.program.recompute)

    @property
    def gap(self) -> float:
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds > 0 else 0.0


def step_weight(ranks: int, micro_batches: int) -> float:
    """Weight of a second that is spent once a step, against one of every micro-batch.

    A balanced pipeline takes about t (M + K - 1)/K + E/K, with t and E sums over all its stages.
    """
    return 1.0 / (micro_batches + ranks - 1)


def unstaged(solution: Solution, micro_batches: int) -> Step:
    """Make the step without stages."""
    cost = solution.priced.cost
    calls = micro_batches * cost.calls
    seconds = max(cost.of(micro_batches), calls)
    return Step(
        solution=solution,
        cost=cost,
        seconds=seconds,
        bound=max(micro_batches * solution.bound, calls) if solution.bound > -math.inf else -math.inf,
        peak_bytes=solution.peak.nbytes,
        state_bytes=solution.peak.state,
        free=seconds,
        calls=calls,
    )


def gathering_together(step: Step, cap: int | None, micro_batches: int, hop: LinkLike) -> Step:
    """The step whose weights are gathered in groups, where that is faster. Not those of schedules that split
    backward: gradients of weights are made one by one there."""
    starts, schedule = step.cut.starts if step.cut else (), step.schedule
    if schedule is not None and (schedule.kind in SPLIT_BACKWARD or step.filling):
        return step
    priced = step.solution.priced.gathered_together(None if starts else cap, starts)
    if priced is step.solution.priced:
        return step
    solution = replace(step.solution, priced=priced, seconds=priced.seconds, held=priced)
    if schedule is not None:
        grouped = staged(solution, schedules=[schedule], hop=hop, cap=None, starts=starts)
    else:
        grouped = unstaged(solution, micro_batches)
    if grouped.seconds > step.seconds or (cap is not None and grouped.peak_bytes > max(cap, step.peak_bytes)):
        return step
    bound = min(step.bound, grouped.seconds)
    return replace(grouped, bound=bound, free=step.free, share=step.share, passed=step.passed)


def staged(
    solution: Solution,
    *,
    schedules: Sequence[Schedule],
    hop: LinkLike,
    cap: int | None,
    relaxed: float | None = None,
    starts: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
    known: Sequence[int] | None = None,
    recompute: Recompute = Recompute.NONE,
    offload: Offload = Offload.NONE,
    cutoff: float = math.inf,
    limit: float = math.inf,
    tables: OrderTables | None = None,
) -> Step:
    """The step with the best cut under the best of `schedules`, or with the cut at `starts`. It lies at some
    of `places`, which begin with 0 and end with the number of operators, if they are given; `known` starts
    of stages among them are where it is sought first.

    `relaxed` bounds the seconds of all assignments where the solution's own bound does not: the one that
    was found with memory to spare. Where parts may be recomputed so that it fits, or tensors moved,
    stages choose for themselves. Raises InputError or InfeasibleError as `cut` does, CutoffError if even
    without a cap neither this assignment nor another takes less than `cutoff` seconds, nor this one than
    `limit`: as it is cut here without a cap, or by its bound under the cap. `tables` know the assignment on
    the devices of other ranks.
    """
    priced, graph = solution.priced, solution.priced.graph
    tables = tables or OrderTables(hop)
    if starts is not None:
        places = tuple(sorted({0, *starts, len(graph.operators)}))
    elif places is None:
        places = choose_places(crossing_bytes(priced), MOST_CUT_PLACES)
    if starts is None:
        apart = inseparable(graph)
        places = tuple(place for place in places if place not in apart)
    table = tables.at(priced, places)
    if starts is not None:
        schedule = schedules[0]
        found = cut_at(table, schedule, starts)
        free = found.seconds
        priced, found = _parted([priced], hop, schedule, None, found)
    else:
        uncapped = cuts([table], schedules, cap=None, known=known, limit=limit)
        found, schedule = best(uncapped)
        free = found.seconds
        check_cutoff(found.bound * share_of(solution, relaxed), cutoff)
        check_cutoff(free, limit)
        if cap is not None and found.over(cap) > 0:
            lean = _Lean(priced, tables, cap, table, uncapped, known, recompute, offload)
            priced, found, schedule = lean.fastest(schedules, bound=found.bound, limit=limit)
        else:
            priced, found = _parted([priced], hop, schedule, cap, found, table.places)
    solution = replace(solution, priced=priced)
    found = replace(found, bound=min(found.bound, found.seconds))
    return step_of(solution, found, schedule, free=free, share=share_of(solution, relaxed))


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to meet a cap: with some schedules, and with what hides on the host, or without. Its cuts take
    at least `bound` seconds, 0 if that isn't known beforehand."""

    schedules: Sequence[Schedule]
    offloads: bool
    bound: float


@dataclass(frozen=True, slots=True)
class _Lean:
    """Cuts of one assignment that meet a cap: `table` is that of the assignment as it is, `free` are its best
    cuts without the cap."""

    priced: PricedProgram
    tables: OrderTables
    cap: int
    table: Intervals
    free: Sequence[ScheduledCut]
    known: Sequence[int] | None
    recompute: Recompute
    offload: Offload

    def fastest(
        self, schedules: Sequence[Schedule], *, bound: float, limit: float
    ) -> tuple[PricedProgram, Cut, Schedule]:
        """The fastest way's program, and its cut with a bound for all of them, at least `bound`. Raises
        CutoffError if none takes less than `limit` seconds, the InfeasibleError that asks for least if none
        meets the cap."""
        waiting = self.ways(schedules)
        check_cutoff(max(bound, min(way.bound for way in waiting)), limit)
        bounds, failures = list[float](), list[InfeasibleError]()
        fastest: tuple[PricedProgram, Cut, Schedule] | None = None
        while waiting:
            way = waiting.pop(0)
            if fastest and way.bound >= fastest[1].seconds:
                bounds.append(way.bound)
                continue
            try:
                priced, cut, schedule = self.cut(way)
            except InfeasibleError as error:  # by what tables and replays differ, perhaps
                failures.append(error)
                bounds += [way.bound] if way.bound else []
                waiting += [self.plain(way.schedules)] if way.offloads else []
                continue
            bounds.append(max(way.bound, cut.bound))
            if fastest is None or cut.seconds < fastest[1].seconds:
                fastest = priced, cut, schedule
        if fastest is None:
            raise min(failures, key=lambda error: error.least or 0)
        priced, cut, schedule = fastest
        return priced, replace(cut, bound=max(bound, min(bounds))), schedule

    def ways(self, schedules: Sequence[Schedule]) -> list[_Way]:
        """The ways there are, the one that promises most first."""
        link = self.priced.prices.cluster.host
        if self.offload is not Offload.AUTO or link is None:
            return [self.plain(schedules)]
        split = [each for each in schedules if each.kind in SPLIT_BACKWARD]
        whole = [each for each in schedules if each.kind not in SPLIT_BACKWARD]
        found = [self.plain(split)] if split else []
        if whole:
            found.append(_Way(whole, True, self.bound(whole, offload_rate=link.bandwidth)))
        return sorted(found, key=lambda way: way.bound)

    def plain(self, schedules: Sequence[Schedule]) -> _Way:
        """The way that moves nothing."""
        return _Way(schedules, False, self.bound(schedules) if self.recompute is Recompute.AUTO else 0.0)

    def bound(self, schedules: Sequence[Schedule], *, offload_rate: float = 0.0) -> float:
        spared = replace(shares(self.priced), offload_rate=offload_rate)
        return recomputing_bound(self.table, spared, schedules, cap=self.cap)

    def cut(self, way: _Way) -> tuple[PricedProgram, Cut, Schedule]:
        """The best cut of a way as it runs; its bound is none if stages choose among levels. Where the replay
        finds more than the tables do, it is sought anew under a cap that is lower by as much."""
        hop, places = self.tables.hop, self.table.places
        programs = levels(self.priced, recompute=self.recompute, offloads=way.offloads)
        lean = [self.tables.at(each, places) for each in programs[1:]]
        cap = self.cap
        for left in reversed(range(CAP_TRIES)):
            cut, schedule = best(self.cuts([self.table, *lean], way, cap))
            try:
                priced, exact = _parted(programs, hop, schedule, self.cap, cut, places)
                break
            except InfeasibleError as error:
                if not left or error.least is None:
                    raise
                cap = int(LOWER * cap * self.cap / error.least)
        if len(programs) == 1:
            return priced, exact, schedule
        shared = any(each.stages_per_rank > 1 for each in way.schedules)
        if (
            shared and not programs[0].program.recompute
        ):  # levels part a rank's memory by a rule that may be wrong
            with contextlib.suppress(InfeasibleError):
                cut, other = best(self.cuts([self.table], way, self.cap))
                if cut.seconds < exact.seconds:
                    priced, exact, schedule = programs[0], cut, other
        return priced, replace(exact, bound=0.0), schedule

    def cuts(self, tables: Sequence[Intervals], way: _Way, cap: int) -> list[ScheduledCut]:
        return cuts(tables, way.schedules, cap=cap, known=self.known, free=self.free)


def levels(priced: PricedProgram, *, recompute: Recompute, offloads: bool) -> list[PricedProgram]:
    """The assignment as it is, and others that need less memory: parts are recomputed, if they may be, and
    what hides is moved, if it `offloads`."""
    found = ladder(priced, RUNGS) if recompute is Recompute.AUTO else [priced]
    if not offloads:
        return found
    lean = [overlapped_of_stages(each) for each in found]
    return [found[0], *(each for each in lean if each.program.recompute or each.program.offload)]


def _parted(
    programs: Sequence[PricedProgram],
    hop: LinkLike,
    schedule: Schedule,
    cap: int | None,
    found: Cut,
    places: Sequence[int] = (),
) -> tuple[PricedProgram, Cut]:
    """Program that the stages of a cut run, of several levels, and the cut as it then is."""
    if not any(each.program.recompute or each.program.offload for each in programs):
        return programs[0], found
    priced, exact = Parting(programs, hop, schedule, cap, places).of(found)
    return priced, replace(exact, bound=found.bound, places=found.places)


def step_of(
    solution: Solution,
    cut: Cut,
    schedule: Schedule,
    *,
    free: float,
    share: float,
) -> Step:
    """The step of an assignment with its cut; `share` and `free` are those of `Step`."""
    fullest = cut.fullest
    cost = solution.priced.remedied(offload=()).cost  # what is moved hides
    calls = schedule.micro_batches * cost.calls / schedule.ranks
    return Step(
        solution=solution,
        cost=cost,
        seconds=max(cut.seconds, calls),
        bound=max(share * cut.bound, calls),
        peak_bytes=cut.rank_bytes[fullest],
        state_bytes=sum(
            stage.state for place, stage in enumerate(cut.stages) if schedule.rank_of(place) == fullest
        ),
        free=free,
        calls=calls,
        share=share,
        cut=cut,
        schedule=schedule,
    )


def share_of(solution: Solution, relaxed: float | None) -> float:
    """The part of the assignment's seconds that all assignments take."""
    bound = solution.bound if relaxed is None else relaxed
    return min(1.0, max(0.0, bound / solution.seconds)) if solution.seconds > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Parting:
    """Operators at which each stage's leaner level ends and the richer one begins: of remedies, or of
    assignments, between which a stage turns at `seams`.

    The tables say about where; how far that can be moved is found by replaying all stages at once. Parts that
    are recomputed and reach over a cut are cut there, too, which the tables don't know.
    """

    programs: Sequence[PricedProgram]
    hop: LinkLike
    schedule: Schedule
    cap: int | None
    inner: Sequence[int]  # places between which moments are told apart
    mixture: Mixture | None = None
    seams: Sequence[int] = ()

    @property
    def operators(self) -> int:
        return len(self.programs[0].graph.operators)

    def of(self, cut: Cut) -> tuple[PricedProgram, Cut]:
        """The program in which as much of each stage as fits is in the richer level, and its cut."""
        ends = (*cut.starts[1:], self.operators)
        turns = [self.turns(*each) for each in zip(cut.mixes, cut.starts, ends, strict=True)]
        mixed = [stage for stage, mix in enumerate(cut.mixes) if mix.share > 0]
        now = [len(each) - 1 for each in turns]
        fitting = list(now)
        for stage in mixed:
            wanted = ends[stage] - cut.mixes[stage].share * (ends[stage] - cut.starts[stage])
            now[stage] = min(range(len(turns[stage])), key=lambda index: abs(turns[stage][index] - wanted))

        def replayed(places: Sequence[int]) -> tuple[PricedProgram, Cut]:
            return self.replayed(cut, [each[place] for each, place in zip(turns, places, strict=True)])

        for probe in range(PROBES if mixed else 0):
            _, found = replayed(now)
            for stage in mixed:
                by = max(1, len(turns[stage]) >> (probe + 3))
                rank = self.schedule.rank_of(stage)
                if self.cap is None or found.rank_bytes[rank] <= self.cap + found.rooms[rank]:
                    fitting[stage] = min(fitting[stage], now[stage])
                    by = -by
                now[stage] = min(max(now[stage] + by, 0), fitting[stage])
        priced, found = replayed(fitting)
        if self.cap is None:
            return priced, found
        if (most := self.cap + found.over(self.cap)) > self.cap:
            raise InfeasibleError(
                where="memory cap of a pipeline whose stages compute parts again",
                found=f"{show_bytes(self.cap)} per device",
                wanted=f"at least {show_bytes(most)} ({most} bytes)",
                remedy="raise --memory, or use more devices, stages or micro-batches",
                least=most,
            )
        return self.fewest(
            cut, [each[place] for each, place in zip(turns, fitting, strict=True)], found, priced
        )

    def fewest(
        self, cut: Cut, turns: Sequence[int], found: Cut, priced: PricedProgram
    ) -> tuple[PricedProgram, Cut]:
        """Offload as few tensors, the largest, as still fit."""
        low, high = -1, len(priced.program.offload)
        while high - low > 1:
            middle = (low + high) // 2
            lean, trial = self.replayed(cut, turns, middle)
            if trial.over(self.cap or 0) <= 0:
                high, priced, found = middle, lean, trial
            else:
                low = middle
        return priced, found

    def turns(self, mix: Mix, start: int, stop: int) -> Sequence[int]:
        """Operators at which a stage may turn."""
        lean, rich = (self.programs[level].program for level in (mix.lean, mix.rich))
        if is_placed_alike(lean, rich):
            return range(start, stop + 1)
        return [place for place in self.seams if start <= place <= stop]

    def replayed(self, cut: Cut, turns: Sequence[int], most: int | None = None) -> tuple[PricedProgram, Cut]:
        """The program in which stages turn so and move what hides, or the `most` largest of it; its cut."""
        operators = self.operators
        spans = [
            (level, first, last)
            for mix, start, turn, stop in zip(
                cut.mixes, cut.starts, turns, (*cut.starts[1:], operators), strict=True
            )
            for level, first, last in ((mix.lean, start, turn), (mix.rich, turn, stop))
        ]
        parts = [
            part
            for level, first, last in spans
            for part in _inside(self.programs[level].program.recompute, first, last)
        ]
        placed = self.programs[0]
        if self.mixture:
            rungs = len(self.programs) - len(self.mixture.programs)  # levels that are placed like the first
            levels = [max(0, level - rungs) for level, first, last in spans for _ in range(first, last)]
            mixed = self.mixture.program(levels)
            placed = PricedProgram(placed.prices, mixed) if mixed else placed
        priced = placed.remedied(recompute=tuple(parts), offload=())
        if any(each.program.offload for each in self.programs):
            offloadable = [
                frozenset(self.programs[level].program.offload)
                for level, first, last in spans
                for _ in range(first, last)
            ]
            priced = moving_in_stages(
                priced, offloadable, starts=cut.starts, schedule=self.schedule, most=most
            )
        places = sorted({*self.inner, *cut.starts, operators})
        table = intervals(priced, self.hop, places=places, starts=cut.starts)
        return priced, cut_at(table, self.schedule, cut.starts)


def _inside(parts: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """Parts of the segments inside [start, stop)."""
    return [(max(first, start), min(last, stop)) for first, last in parts if first < stop and last > start]
