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
from dataclasses import replace

from autopar.cost.machine.model import CostModel
from autopar.errors import InfeasibleError, SolverError
from autopar.explaining.asked import Asked
from autopar.explaining.layers import SOLVING, Alternatives
from autopar.planning.mesh_search import MeshProblem
from autopar.results.frontier import Frontier, Point, undominated
from autopar.results.plan import Plan
from autopar.sharding.strategies import find_atoms
from costdb.database import Database

SECONDS = 30.0  # for all caps
SHARES = (0.85, 0.7, 0.55, 0.4, 0.25)  # of what the fastest plan needs


def frontier(asked: Asked, plan: Plan, *, seconds: float = SECONDS) -> Frontier:
    """The frontier around a plan of what was asked; it is solved for about so many seconds."""
    return _Search(problem_of(asked, plan), asked, plan, time.monotonic() + seconds).found()


def problem_of(asked: Asked, plan: Plan) -> MeshProblem:
    """The plan's program without a memory cap, with what is known of operators' seconds by now."""
    request = replace(asked.request()[0].settled(plan), alternatives=False, measure=False, memory=None)
    target, whole = asked.target, asked.cluster
    graph = asked.compiler(request).trace_step(target.model, target.args, target.kwargs).graph
    with Database.open(asked.options.get("costdb")) as database:
        model = CostModel.of(whole, database)
    return MeshProblem(
        graph,
        find_atoms(graph),
        plan.mesh,
        whole.stage(request.stages),
        model,
        request,
        None,
        model.hop(whole, request.stages),
    )


class _Search:
    def __init__(self, problem: MeshProblem, asked: Asked, plan: Plan, deadline: float) -> None:
        self.problem, self.plan, self.deadline = problem, plan, deadline
        self.alternatives = Alternatives(problem, asked.cluster)
        self.limit: float | None = asked.options.get("time_limit")

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def found(self) -> Frontier:
        """The frontier, as far as time lasts."""
        points, failed = [Point.of(self.plan)], None
        if self.plan.memory_cap is not None:
            if self.is_over:
                return Frontier(tuple(points), untried=len(SHARES) + 1)
            points += self.solved(None)
        most = max(point.peak_bytes for point in points)
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

    def least(self, error: InfeasibleError) -> Iterator[Point]:
        """The leanest plan that is known, after a cap that no plan meets."""
        if math.isfinite(error.would_do) and not self.is_over:
            try:
                yield from self.solved(int(error.would_do))
            except InfeasibleError:
                return

    def solved(self, cap: int | None) -> list[Point]:
        """The point of a cap, none if time was too short; raises InfeasibleError where no plan meets it."""
        limit = min(self.limit or SOLVING, max(1.0, self.deadline - time.monotonic()))
        problem = self.alternatives.like(cap=cap, request=replace(self.problem.request, time_limit=limit))
        try:
            return [Point.of(self.alternatives.solved(problem, cap=cap))]
        except SolverError:
            return []
