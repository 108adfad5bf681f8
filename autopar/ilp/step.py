"""A placement as a whole training step: its micro-batches, and its stages where there are several.

One group of ranks does M micro-batches one after the other and then what is done once: M t + E. With
stages the cut is sought for this one placement (stages.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.core.costs import LinkLike
from autopar.core.graph import Graph
from autopar.core.plan import Program
from autopar.core.recompute import Recompute
from autopar.core.schedule import Schedule
from autopar.cost.again import shares
from autopar.cost.intervals import choose_places, crossing_bytes, intervals
from autopar.cost.prices import Prices
from autopar.cost.step import StepCost, step_cost
from autopar.ilp.choose import Solution
from autopar.ilp.recompute import ladder
from autopar.ilp.stages import MOST_PLACES, Cut, best_cut, bound_again, keep

RUNGS = 5  # levels of recomputing, beside none, among which stages choose


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `seconds` with a lower bound: on all placements and cuts by the seconds of all stages
    together, and on all cuts for this placement. Bytes are those of the fullest rank."""

    solution: Solution
    cost: StepCost
    seconds: float
    bound: float
    peak_bytes: int
    state_bytes: int
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
    recompute: Recompute = Recompute.NONE,
) -> Step:
    """The step with the best cut under the best of `schedules`, or with the cut at `starts`. It lies at some
    of `places`, which begin with 0 and end with the number of operators, if they are given.

    `relaxed` bounds the seconds of all placements where the solution's own bound does not: the one that
    was found with memory to spare. Where parts may be computed again so that it fits, stages choose for
    themselves. Raises InputError or InfeasibleError as `cut` does.
    """
    if starts is not None:
        places = tuple(sorted({0, *starts, len(graph.operators)}))
    elif places is None:
        places = choose_places(crossing_bytes(graph, prices, solution.program), MOST_PLACES)
    table = intervals(graph, prices, solution.program, hop, places=places)
    programs = [solution.program]
    if starts is None:
        found, schedule = best_cut([table], schedules, cap=None)
        if cap is not None and max(found.rank_bytes) > cap:
            bound = found.bound
            if recompute is Recompute.AUTO:
                programs = ladder(graph, prices, solution.program, RUNGS)
                spared = shares(graph, prices, solution.program)
                bound = max(bound, bound_again(table, spared, schedules, cap=cap))
            tables = [table, *(intervals(graph, prices, each, hop, places=places) for each in programs[1:])]
            found, schedule = best_cut(tables, schedules, cap=cap)
            found = replace(found, bound=min(bound, found.seconds)) if len(tables) > 1 else found
    else:
        found, schedule = keep(table, schedules[0], starts), schedules[0]
    program = _recomputed(programs, found, len(graph.operators))
    solution = replace(solution, program=program)
    bound = solution.bound if relaxed is None else relaxed
    share = min(1.0, max(0.0, bound / solution.seconds)) if solution.seconds > 0 else 1.0
    fullest = max(range(schedule.ranks), key=lambda rank: found.rank_bytes[rank])
    return Step(
        solution=solution,
        cost=step_cost(graph, prices, program),
        seconds=found.seconds,
        bound=share * found.bound,
        peak_bytes=found.rank_bytes[fullest],
        state_bytes=sum(
            stage.state for place, stage in enumerate(found.stages) if schedule.rank_of(place) == fullest
        ),
        cut=found,
        schedule=schedule,
    )


def _recomputed(programs: Sequence[Program], cut: Cut, operators: int) -> Program:
    """The program in which every stage has the recomputed parts of its own level."""
    parts = [
        (max(first, start), min(last, stop))
        for level, (start, stop) in zip(cut.levels, pairwise((*cut.starts, operators)), strict=True)
        for first, last in programs[level].recompute
        if first < stop and last > start
    ]
    return replace(programs[0], recompute=tuple(parts))
