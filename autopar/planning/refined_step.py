"""A step with stages, made faster where it is: each stage may turn to an assignment of its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, partial

from autopar.core.deadline import is_over
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.planning.asked.ask import Limits
from autopar.planning.assignment_problem import AssignmentProblem
from autopar.planning.whole_step import SECONDS_TOLERANCE
from autopar.schedules.in_flight import mean_flight
from autopar.solve.assignment.memory_frontier import MemoryPricedProgram
from autopar.solve.program.solution import Solution
from autopar.solve.stages.joint_bound import MOST_OPERATORS
from autopar.solve.stages.rank_bounds import Scarcity
from autopar.solve.stages.refine import Refinement
from autopar.solve.stages.step import Step

BOUNDED = (0.5, 0.8, 1.0, 1.2, 1.6)  # times what a byte has cost: prices for a bound
MIXED = 3  # assignments, beside a step's own, that its operators may follow


@dataclass(frozen=True, slots=True)
class RefinedStep:
    """A step that is refined, and what bounds it."""

    problem: AssignmentProblem

    def of(self, step: Step, deadline: float | None, others: float) -> Step:
        """The step refined as far as time goes; raises SolverError if the solver fails."""
        if step.cut is None or is_over(deadline):
            return step
        problem, request = self.problem, self.problem.request
        fastest = problem.solve(problem.ask(request.force), Limits(deadline))
        refinement = Refinement(
            step.solution.priced.prices,
            problem.hop,
            problem.cap,
            request.recompute,
            problem.offload,
            problem.schedules,
            fastest.bound,
            deadline=deadline,
        )
        fixed = request.stages_of_uses is not None or problem.places is not None
        few = len(problem.graph.operators) <= MOST_OPERATORS  # with a bound of their own
        if few or fixed or problem.graph.checkpoints or problem.blocks:
            return refinement.refilled(step)
        if problem.cap is not None and step.solution.seconds > fastest.seconds * (1 + SECONDS_TOLERANCE):
            refinement.others, refinement.scarcity = self.others_than(step, fastest)
        found = refinement.of(step)
        return dataclasses.replace(found, bound=min(found.bound, others))

    def others_than(self, step: Step, fastest: Solution) -> tuple[list[Program], Scarcity | None]:
        """For a step that memory made slower, assignments that are faster and take more.

        With them, what memory makes all assignments take, by prices around what a byte has cost.
        """
        problem, request, solution = self.problem, self.problem.request, step.solution
        flight, space = min(map(mean_flight, problem.schedules)), problem.spaces[request.force]
        ask = partial(MemoryPricedProgram, problem.graph, problem.prices, space, problem.folding)
        corners = list(ask().corners(flight, solution.seconds * (1 - SECONDS_TOLERANCE)))
        spared = (
            fastest.peak.state - solution.peak.state + flight * (fastest.peak.saved - solution.peak.saved)
        )
        others = [*corners[:1], *corners[1:][1 - MIXED :]]
        if spared <= 0:
            return others, None
        recomputes = request.recompute is not Recompute.NONE
        price = request.micro_batches * (solution.seconds - fastest.seconds) / spared
        return others, Scarcity(
            cap=float(problem.cap or 0),
            free=fastest.bound,
            prices=[factor * price for factor in BOUNDED],
            least=cache(ask(relaxed=True, recomputes=recomputes).least),
        )
