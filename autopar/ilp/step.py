"""A placement as a whole training step: its micro-batches, and its stages where there are several.

One group of ranks does M micro-batches one after the other and then what is done once: M t + E. With
stages the cut is sought for this one placement (stages.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.core.costs import LinkLike
from autopar.core.graph import Graph
from autopar.core.pipeline import inseparable
from autopar.core.plan import Program
from autopar.core.recompute import Recompute, Segment
from autopar.core.schedule import SPLIT_BACKWARD, Schedule
from autopar.cost.again import shares
from autopar.cost.intervals import choose_places, crossing_bytes, intervals
from autopar.cost.prices import Prices
from autopar.cost.step import StepCost, step_cost
from autopar.errors import InfeasibleError
from autopar.ilp.choose import Solution, refuse_beaten
from autopar.ilp.recompute import ladder
from autopar.ilp.stages import MOST_PLACES, Cut, best, bound_again, closer_bound, cuts, keep
from autopar.units import show_bytes

RUNGS = 5  # levels of recomputing, beside none, among which stages choose
PROBES = 4  # of where in a stage the level changes
MOST_NEAR = 360  # places around those of a cut
RECUTS = 2
WORTHWHILE = 2e-3  # of a step's seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `seconds` with a lower bound: on all cuts for this placement, and on all placements by the
    seconds of all stages together. Of these alone the bound is larger by 1 / `share`; if memory had no end
    the placement would take `free` seconds. Bytes are those of the fullest rank.

    Where operators are few another placement may be cut more evenly: there exchange.py bounds the plan."""

    solution: Solution
    cost: StepCost
    seconds: float
    bound: float
    peak_bytes: int
    state_bytes: int
    free: float
    share: float = 1.0
    cut: Cut | None = None
    schedule: Schedule | None = None

    @property
    def gap(self) -> float:
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds > 0 else 0.0


def once(ranks: int, micro_batches: int) -> float:
    """What a second that is spent once a step counts against one of every micro-batch.

    A balanced pipeline takes about t (M + K - 1)/K + E/K, with t and E sums over all its stages.
    """
    return 1.0 / (micro_batches + ranks - 1)


def unstaged(graph: Graph, prices: Prices, solution: Solution, micro_batches: int) -> Step:
    """The step without stages."""
    cost = step_cost(graph, prices, solution.program)
    return Step(
        solution=solution,
        cost=cost,
        seconds=cost.of(micro_batches),
        bound=micro_batches * solution.bound,
        peak_bytes=solution.peak.nbytes,
        state_bytes=solution.peak.state,
        free=cost.of(micro_batches),
    )


def staged(
    graph: Graph,
    prices: Prices,
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
    beat: float = math.inf,
    limit: float = math.inf,
) -> Step:
    """The step with the best cut under the best of `schedules`, or with the cut at `starts`. It lies at some
    of `places`, which begin with 0 and end with the number of operators, if they are given; `known` starts
    of stages among them are where it is sought first.

    `relaxed` bounds the seconds of all placements where the solution's own bound does not: the one that
    was found with memory to spare. Where parts may be computed again so that it fits, stages choose for
    themselves. Raises InputError or InfeasibleError as `cut` does, BeatenError if even without a cap neither
    this placement nor another takes less than `beat` seconds, nor this one than `limit`: as it is cut here
    without a cap, or by its bound under the cap.
    """
    if starts is not None:
        places = tuple(sorted({0, *starts, len(graph.operators)}))
    elif places is None:
        places = choose_places(crossing_bytes(graph, prices, solution.program), MOST_PLACES)
    if starts is None:
        apart = inseparable(graph)
        places = tuple(place for place in places if place not in apart)
    table = intervals(graph, prices, solution.program, hop, places=places)
    programs = [solution.program]
    if starts is None:
        uncapped = cuts([table], schedules, cap=None, known=known)
        found, schedule = best(uncapped)
        free, bound = found.seconds, found.bound
        refuse_beaten(bound * _share(solution, relaxed), beat)
        refuse_beaten(free, limit)
        if cap is not None and max(found.rank_bytes) > cap:
            if recompute is Recompute.AUTO:
                programs = ladder(graph, prices, solution.program, RUNGS)
                spared = shares(graph, prices, solution.program)
                bound = max(bound, bound_again(table, spared, schedules, cap=cap))
                refuse_beaten(bound, limit)
            tables = [table, *(intervals(graph, prices, each, hop, places=places) for each in programs[1:])]
            found, schedule = best(cuts(tables, schedules, cap=cap, known=known, free=uncapped))
            bound = bound if len(tables) > 1 else found.bound
    else:
        found, schedule = keep(table, schedules[0], starts), schedules[0]
        free, bound = found.seconds, found.bound
    if programs[-1].recompute:
        limited = None if starts is not None else cap
        inner = table.places if schedule.kind in SPLIT_BACKWARD else ()
        program, exact = _Parting(graph, prices, programs, hop, schedule, limited, inner).of(found)
        solution = replace(solution, program=program)
        found = replace(exact, places=found.places)
    found = replace(found, bound=min(bound, found.seconds))
    share = _share(solution, relaxed)
    fullest = max(range(schedule.ranks), key=lambda rank: found.rank_bytes[rank])
    return Step(
        solution=solution,
        cost=step_cost(graph, prices, solution.program),
        seconds=found.seconds,
        bound=share * found.bound,
        peak_bytes=found.rank_bytes[fullest],
        state_bytes=sum(
            stage.state for place, stage in enumerate(found.stages) if schedule.rank_of(place) == fullest
        ),
        free=free,
        share=share,
        cut=found,
        schedule=schedule,
    )


def _share(solution: Solution, relaxed: float | None) -> float:
    """The part of the placement's seconds that all placements take."""
    bound = solution.bound if relaxed is None else relaxed
    return min(1.0, max(0.0, bound / solution.seconds)) if solution.seconds > 0 else 1.0


def recut(
    graph: Graph,
    prices: Prices,
    step: Step,
    *,
    schedules: Sequence[Schedule],
    hop: LinkLike,
    cap: int | None,
    recompute: Recompute,
) -> Step:
    """The step with its stages cut at any operator around where they are cut now, if they were sought at some
    of many places, for as long as that makes it faster; with a bound on the cuts at all these places, as
    close as is known. Memory has no part in what makes it closer, as other placements may need less."""
    if step.cut is None or step.schedule is None:
        return step
    solution = step.solution
    if recompute is Recompute.AUTO:
        solution = replace(solution, program=replace(solution.program, recompute=()))
    operators = len(graph.operators)
    sought = [
        _Sought(
            step.bound, choose_places(crossing_bytes(graph, prices, solution.program), MOST_PLACES), schedules
        )
    ]
    for _ in range(RECUTS):
        if step.cut.places == operators:
            break
        starts = step.cut.starts
        places = _around(starts, operators)
        try:
            near = staged(
                graph,
                prices,
                solution,
                schedules=[step.schedule],
                hop=hop,
                cap=cap,
                places=places,
                known=starts,
                recompute=recompute,
            )
        except InfeasibleError:  # by what tables and replays differ
            break
        assert near.cut is not None
        sought.append(_Sought(step.share * near.cut.bound, places, [step.schedule]))
        gain = 1 - near.seconds / step.seconds
        step = replace(near if gain > 0 else step, share=step.share)
        assert step.cut is not None
        if gain < WORTHWHILE or not _at_edge(near.cut.starts, starts, places):
            break
    bounds = []
    for each in sought:
        table = intervals(graph, prices, solution.program, hop, places=each.places)
        closer = closer_bound(table, each.schedules, most=step.seconds)
        bounds.append(max(each.bound, step.share * closer))
    return replace(step, bound=min(step.seconds, *bounds))


@dataclass(frozen=True, slots=True)
class _Sought:
    """Places at which cuts under `schedules` were sought, and a bound on the seconds of all of them."""

    bound: float
    places: Sequence[int]
    schedules: Sequence[Schedule]


def _at_edge(starts: Sequence[int], before: Sequence[int], places: Sequence[int]) -> bool:
    """Whether one of the starts might have moved further than the places around it allowed."""
    known = set(places)
    return any(
        old != new and not known.issuperset((new - 1, new + 1))
        for new, old in zip(starts, before, strict=True)
    )


def _around(starts: Sequence[int], operators: int) -> tuple[int, ...]:
    """As many places as may be, next to those where stages start."""
    inner = starts[1:]
    reach = max(1, (MOST_NEAR // max(1, len(inner)) - 1) // 2)
    near = {start + by for start in inner for by in range(-reach, reach + 1)}
    return (0, *sorted(place for place in near if 0 < place < operators), operators)


@dataclass(frozen=True, slots=True)
class _Parting:
    """Where in each stage of a cut its leaner level of recomputing ends and the richer one begins.

    The tables say about where; how far that can be moved is found by replaying all stages at once. Parts that
    reach over a cut are cut there, too, which the tables don't know.
    """

    graph: Graph
    prices: Prices
    programs: Sequence[Program]
    hop: LinkLike
    schedule: Schedule
    cap: int | None
    inner: Sequence[int]  # places between which halves of backward are told apart

    def of(self, cut: Cut) -> tuple[Program, Cut]:
        """The program in which as much of each stage as fits is in the richer level, and its cut."""
        ends = (*cut.starts[1:], len(self.graph.operators))
        spans = [stop - start for start, stop in zip(cut.starts, ends, strict=True)]
        mixed = [stage for stage, mix in enumerate(cut.mixes) if mix.share > 0]
        turns, fitting = list(ends), list(ends)
        for stage in mixed:
            turns[stage] -= round(cut.mixes[stage].share * spans[stage])
        for probe in range(PROBES if mixed else 0):
            _, found = self.replayed(cut, turns)
            for stage in mixed:
                by = max(1, spans[stage] >> (probe + 3))
                if self.cap is None or found.rank_bytes[self.schedule.rank_of(stage)] <= self.cap:
                    fitting[stage] = min(fitting[stage], turns[stage])
                    by = -by
                turns[stage] = min(max(turns[stage] + by, cut.starts[stage]), fitting[stage])
        program, found = self.replayed(cut, fitting)
        if self.cap is not None and (most := max(found.rank_bytes)) > self.cap:
            raise InfeasibleError(
                where="memory cap of a pipeline whose stages compute parts again",
                found=f"{show_bytes(self.cap)} per device",
                wanted=f"at least {show_bytes(most)} ({most} bytes)",
                remedy="raise --memory, or use more devices or stages",
                least=most,
            )
        return program, found

    def replayed(self, cut: Cut, turns: Sequence[int]) -> tuple[Program, Cut]:
        operators = len(self.graph.operators)
        parts = [
            part
            for mix, start, turn, stop in zip(
                cut.mixes, cut.starts, turns, (*cut.starts[1:], operators), strict=True
            )
            for level, first, last in ((mix.lean, start, turn), (mix.rich, turn, stop))
            for part in _inside(self.programs[level].recompute, first, last)
        ]
        program = replace(self.programs[0], recompute=tuple(parts))
        places = sorted({*self.inner, *cut.starts, operators})
        table = intervals(self.graph, self.prices, program, self.hop, places=places)
        return program, keep(table, self.schedule, cut.starts)


def _inside(parts: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """What of the parts lies in [start, stop)."""
    return [(max(first, start), min(last, stop)) for first, last in parts if first < stop and last > start]
