"""The frontier of seconds and bytes around a plan: solved again under lower and lower caps.

    without a cap    61 ms   13.1 MB
    11.1 MB          63 ms   11.0 MB        each cap is a share of what the fastest plan needs
     9.2 MB          72 ms    9.1 MB
     7.2 MB          no plan; 8.1 MB is known to do, and solved, too

Mesh, stages and micro-batches are the plan's. No further cap is solved when the time is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from autopar.errors import InfeasibleError, SolverError
from autopar.explaining.asked import AskedPlan
from autopar.explaining.explain import problem_of
from autopar.explaining.layers import Alternatives
from autopar.results.plan.frontier import Frontier, Point, undominated
from autopar.results.plan.plan import Plan

FRONTIER_SECONDS = 30.0  # for all caps
SHARES = (0.85, 0.7, 0.55, 0.4, 0.25)  # of what the fastest plan needs


def frontier(asked: AskedPlan, plan: Plan, *, seconds: float = FRONTIER_SECONDS) -> Frontier:
    """The frontier around a plan of what was asked; it is solved for about so many seconds."""
    problem = problem_of(asked, plan)
    return _FrontierSearch(
        Alternatives(problem, asked.cluster, until=time.monotonic() + seconds), plan
    ).found()


class _FrontierSearch:
    def __init__(self, alternatives: Alternatives, plan: Plan) -> None:
        self.alternatives, self.plan = alternatives, plan

    @property
    def is_over(self) -> bool:
        return self.alternatives.is_over

    def found(self) -> Frontier:
        """The frontier, as far as time lasts."""
        points, failed = self.own(), None
        if self.plan.memory_cap is not None and not self.is_over:
            points += self.solved(None)
        most = max((point.peak_bytes for point in points), default=0)
        waiting = [int(share * most) for share in SHARES]
        while waiting and not self.is_over:
            cap = waiting.pop(0)
            if cap >= min(point.peak_bytes for point in points):
                continue
            try:
                points += self.solved(cap)
            except InfeasibleError as error:
                failed = cap
                points += self.least(error)
                waiting = []
        return Frontier(undominated(points), failed, len(waiting))

    def own(self) -> list[Point]:
        """The plan's point; where operators were measured, by what is known of them now, as all others."""
        problem = self.alternatives.problem
        if problem.request.measure and problem.model.here:
            return [] if self.is_over else self.solved(self.plan.memory_cap)
        return [Point.of(self.plan)]

    def least(self, error: InfeasibleError) -> Iterator[Point]:
        """The leanest plan that is known, after a cap that no plan meets."""
        if math.isfinite(error.would_do) and not self.is_over:
            try:
                yield from self.solved(int(error.would_do))
            except InfeasibleError:
                return

    def solved(self, cap: int | None) -> list[Point]:
        """The point of a cap, none if time was too short; raises InfeasibleError where no plan meets it."""
        try:
            return [Point.of(self.alternatives.solved(self.alternatives.like(cap=cap), cap=cap))]
        except SolverError:
            return []
