"""One mesh's problem: what the best step on it is, its assignment and its cut into stages.

fastest     without stages (whole_step.py), or with them (staged_step.py)      -> a step
plan        with the model's own checkpoints, and a closer bound               -> a step
refined     stages turn to assignments of their own (refined_step.py)          -> a step
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass

from autopar.core.force import Force
from autopar.core.recompute import Recompute
from autopar.cost.stages.intervals import choose_places, crossing_bytes, intervals
from autopar.errors import SolverError
from autopar.planning.asked.ask import UNLIMITED, Ask, Limits
from autopar.planning.assignment_problem import AssignmentProblem
from autopar.planning.refined_step import RefinedStep
from autopar.planning.staged_step import StagedStep
from autopar.planning.whole_step import WholeStep
from autopar.solve.stages.cut_search import MOST_CUT_PLACES
from autopar.solve.stages.joint_bound import MOST_OPERATORS, ExchangeTables
from autopar.solve.stages.step import Step, unstaged
from autopar.solve.stages.user_checkpoints import respect


@dataclass(slots=True)
class MeshProblem(AssignmentProblem):
    """One mesh's problem, and its best step."""

    def plan(self, ask: Ask, limits: Limits = UNLIMITED) -> Step:
        """Find the best step; in it the model's own checkpoints, if no others are asked for.

        Its bound is none if it need not be `bounded`.
        """
        found = self.fastest(ask, limits)
        if self.request.training and self.request.recompute is Recompute.AUTO:
            count = self.request.micro_batches
            found = respect(found, micro_batches=count, hop=self.hop, cap=ask.cap)
        few = len(self.graph.operators) <= MOST_OPERATORS and not self.blocks
        if ask.bounded and found.cut is not None and few:
            with contextlib.suppress(SolverError):
                found = dataclasses.replace(found, bound=min(found.seconds, self.least(ask.force, limits)))
        return found

    def least(self, force: Force | None, limits: Limits) -> float:
        """Seconds that no step with stages takes less than, whatever the assignment and the cut."""
        fastest = self.solve(self.ask(force), limits)
        places = self.places or choose_places(crossing_bytes(fastest.priced), MOST_CUT_PLACES)
        table = intervals(fastest.priced, self.hop, places=places)
        space = self.spaces[force]
        return ExchangeTables(self.graph, self.prices, space, self.folding, fastest, table).bound(
            self.schedules
        )

    def fastest(self, ask: Ask, limits: Limits) -> Step:
        """The best step as one assignment gives it."""
        if self.request.relay:
            return unstaged(self.solve(self.ask(ask.force), limits), 1)
        if self.request.pipeline_ranks == 1:
            return WholeStep(self).best(ask, limits)
        return StagedStep(self).best(ask, limits)

    def refined(self, step: Step, deadline: float | None = None, others: float = math.inf) -> Step:
        """The step with all that makes it faster where it is, with a closer bound, as far as time goes; no
        step on another mesh takes less than `others` seconds."""
        with contextlib.suppress(SolverError):  # there is a step already
            step = RefinedStep(self).of(step, deadline, others)
        return step
