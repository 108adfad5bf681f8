"""A placement as a whole training step: its micro-batches, and its stages where there are several.

One group of ranks does M micro-batches one after the other and then what is done once: M t + E. With
stages the cut is sought for this one placement (stages.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.core.costs import LinkLike
from autopar.core.graph import Graph
from autopar.core.schedule import Schedule
from autopar.cost.intervals import crossing_bytes, intervals
from autopar.cost.prices import Prices
from autopar.cost.step import StepCost, step_cost
from autopar.ilp.choose import Solution
from autopar.ilp.stages import Cut, best_cut, choose_places, keep


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
) -> Step:
    """The step with the best cut under the best of `schedules`, or with the cut at `starts`.

    `relaxed` bounds the seconds of all placements where the solution's own bound does not: the one that
    was found with memory to spare. Raises InputError or InfeasibleError as `cut` does.
    """
    places = choose_places(crossing_bytes(graph, prices, solution.program))
    if starts is not None:
        places = tuple(sorted({0, *starts, len(graph.operators)}))
    table = intervals(graph, prices, solution.program, hop, places=places)
    if starts is None:
        found, schedule = best_cut(table, schedules, cap=cap)
    else:
        found, schedule = keep(table, schedules[0], starts), schedules[0]
    bound = solution.bound if relaxed is None else relaxed
    share = min(1.0, max(0.0, bound / solution.seconds)) if solution.seconds > 0 else 1.0
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
        cut=found,
        schedule=schedule,
    )
