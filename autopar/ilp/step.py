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
from autopar.core.timeline import StageCost
from autopar.cost.again import shares
from autopar.cost.intervals import choose_places, crossing_bytes, intervals
from autopar.cost.prices import Prices
from autopar.cost.step import StepCost, step_cost
from autopar.errors import InfeasibleError
from autopar.ilp.choose import Solution, refuse_beaten
from autopar.ilp.cut_problem import Mix
from autopar.ilp.mixture import Mixture, is_placed_alike
from autopar.ilp.recompute import ladder
from autopar.ilp.stages import MOST_PLACES, Cut, best, bound_again, cuts, keep
from autopar.units import show_bytes

RUNGS = 5  # levels of recomputing, beside none, among which stages choose
PROBES = 4  # of where in a stage the level changes


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
    filling: tuple[StageCost, ...] = ()  # for which the schedule's waits are filled, if they are

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
        refuse_beaten(bound * share_of(solution, relaxed), beat)
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
        program, exact = Parting(graph, prices, programs, hop, schedule, limited, inner).of(found)
        solution = replace(solution, program=program)
        found = replace(exact, places=found.places)
    found = replace(found, bound=min(bound, found.seconds))
    return step_of(graph, prices, solution, found, schedule, free=free, share=share_of(solution, relaxed))


def step_of(
    graph: Graph,
    prices: Prices,
    solution: Solution,
    cut: Cut,
    schedule: Schedule,
    *,
    free: float,
    share: float,
) -> Step:
    """The step of a placement with its cut; `share` and `free` are those of `Step`."""
    fullest = max(range(schedule.ranks), key=lambda rank: cut.rank_bytes[rank])
    return Step(
        solution=solution,
        cost=step_cost(graph, prices, solution.program),
        seconds=cut.seconds,
        bound=share * cut.bound,
        peak_bytes=cut.rank_bytes[fullest],
        state_bytes=sum(
            stage.state for place, stage in enumerate(cut.stages) if schedule.rank_of(place) == fullest
        ),
        free=free,
        share=share,
        cut=cut,
        schedule=schedule,
    )


def share_of(solution: Solution, relaxed: float | None) -> float:
    """The part of the placement's seconds that all placements take."""
    bound = solution.bound if relaxed is None else relaxed
    return min(1.0, max(0.0, bound / solution.seconds)) if solution.seconds > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Parting:
    """Where in each stage of a cut its leaner level ends and the richer one begins: of recomputing, or of
    placements, between which a stage turns at `seams`.

    The tables say about where; how far that can be moved is found by replaying all stages at once. Parts that
    are computed again and reach over a cut are cut there, too, which the tables don't know.
    """

    graph: Graph
    prices: Prices
    programs: Sequence[Program]
    hop: LinkLike
    schedule: Schedule
    cap: int | None
    inner: Sequence[int]  # places between which halves of backward are told apart
    mixture: Mixture | None = None
    seams: Sequence[int] = ()

    def of(self, cut: Cut) -> tuple[Program, Cut]:
        """The program in which as much of each stage as fits is in the richer level, and its cut."""
        ends = (*cut.starts[1:], len(self.graph.operators))
        turns = [self.turns(*each) for each in zip(cut.mixes, cut.starts, ends, strict=True)]
        mixed = [stage for stage, mix in enumerate(cut.mixes) if mix.share > 0]
        now = [len(each) - 1 for each in turns]
        fitting = list(now)
        for stage in mixed:
            wanted = ends[stage] - cut.mixes[stage].share * (ends[stage] - cut.starts[stage])
            now[stage] = min(range(len(turns[stage])), key=lambda index: abs(turns[stage][index] - wanted))

        def replayed(places: Sequence[int]) -> tuple[Program, Cut]:
            return self.replayed(cut, [each[place] for each, place in zip(turns, places, strict=True)])

        for probe in range(PROBES if mixed else 0):
            _, found = replayed(now)
            for stage in mixed:
                by = max(1, len(turns[stage]) >> (probe + 3))
                if self.cap is None or found.rank_bytes[self.schedule.rank_of(stage)] <= self.cap:
                    fitting[stage] = min(fitting[stage], now[stage])
                    by = -by
                now[stage] = min(max(now[stage] + by, 0), fitting[stage])
        program, found = replayed(fitting)
        if self.cap is not None and (most := max(found.rank_bytes)) > self.cap:
            raise InfeasibleError(
                where="memory cap of a pipeline whose stages compute parts again",
                found=f"{show_bytes(self.cap)} per device",
                wanted=f"at least {show_bytes(most)} ({most} bytes)",
                remedy="raise --memory, or use more devices or stages",
                least=most,
            )
        return program, found

    def turns(self, mix: Mix, start: int, stop: int) -> Sequence[int]:
        """Where a stage may turn."""
        lean, rich = (self.programs[level] for level in (mix.lean, mix.rich))
        if is_placed_alike(lean, rich):
            return range(start, stop + 1)
        return [place for place in self.seams if start <= place <= stop]

    def replayed(self, cut: Cut, turns: Sequence[int]) -> tuple[Program, Cut]:
        operators = len(self.graph.operators)
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
            for part in _inside(self.programs[level].recompute, first, last)
        ]
        placed = self.programs[0]
        if self.mixture:
            rungs = len(self.programs) - len(self.mixture.programs)  # levels that are placed like the first
            levels = [max(0, level - rungs) for level, first, last in spans for _ in range(first, last)]
            placed = self.mixture.program(levels) or placed
        program = replace(placed, recompute=tuple(parts))
        places = sorted({*self.inner, *cut.starts, operators})
        table = intervals(self.graph, self.prices, program, self.hop, places=places)
        return program, keep(table, self.schedule, cut.starts)


def _inside(parts: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """What of the parts lies in [start, stop)."""
    return [(max(first, start), min(last, stop)) for first, last in parts if first < stop and last > start]
