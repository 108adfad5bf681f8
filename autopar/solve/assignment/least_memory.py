"""The least memory that would do, for who hears that a cap can't be met."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.core.graph import Graph
from autopar.core.offload import Offload
from autopar.core.placement import replicated
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import InfeasibleError
from autopar.solve.assignment.goal import ANY_PLAN, Effort, Goal
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.space import Space
from autopar.solve.highs import SECOND, solve
from autopar.solve.memory.remedies import remedies
from autopar.solve.program.decode import read
from autopar.solve.program.problem import Problem
from autopar.solve.program.solution import Solution, completed
from autopar.solve.tables.choice_tables import WideError
from autopar.solve.tables.memory_tables import MemoryTables
from autopar.solve.tables.priced_elimination import DEAREST, cheapest_at
from autopar.units import show_bytes

LEAN_WORK = 30 * SECOND  # in all, for the least memory that would do
LEAN_EFFORT = Effort(work=LEAN_WORK)


def least(
    graph: Graph,
    prices: Prices,
    space: Space,
    folding: Folding,
    goal: Goal = ANY_PLAN,
    effort: Effort = LEAN_EFFORT,
    *,
    recomputes: bool = False,
) -> tuple[Solution | None, float]:
    """Find the plan in `space` that needs least memory by its rows, of several a fast one.

    With the work that it took; None if it is not found with so much effort. Parts are recomputed, and tensors
    offloaded, so that it fits the goal's cap, if it can; with `recomputes` the rows take it that parts are.
    """
    try:
        program, status, spent = _eliminated(graph, prices, space, folding, recomputes), "gap_limit", 0.0
    except WideError:
        problem = Problem(graph, prices, space, folding, cap=math.inf, recomputes=recomputes)
        problem.lp.ties = problem.lp.costs
        problem.lp.costs = [0.0] * len(problem.lp.ties)
        for nbytes, variable in problem.memory.held:
            problem.lp.costs[variable] += nbytes / 2**30
        answer = solve(problem.lp, gap=1e-3, time_limit=effort.time_limit, work=effort.work)
        if answer.values is None:
            return None, answer.work
        program, status, spent = read(problem, answer), answer.status, answer.work
    priced = PricedProgram(prices, program)
    solution = completed(priced, goal.cap or 0, recompute=goal.recompute, offload=goal.offload)
    return replace(solution, status=status), spent


def _eliminated(graph: Graph, prices: Prices, space: Space, folding: Folding, recomputes: bool) -> Program:
    """The program that holds fewest bytes; raises WideError where blocks are equal, or tables too large."""
    if folding.count > 1:
        raise WideError
    tables = MemoryTables(graph, prices, space, folding, offloads=False)
    program, _ = cheapest_at(tables, DEAREST, recomputes=recomputes)
    return program


def infeasible(
    prices: Prices,
    cap: int,
    found: Solution | None,
    *,
    recompute: Recompute,
    offload: Offload,
) -> InfeasibleError:
    """Says the least that would do, what would give it, and which inputs hold most."""
    minimum = found.peak.nbytes if found else -1
    sizes = {
        item.target: prices.state_bytes(item.name, replicated(len(prices.dims.mesh.shape)))
        for item in prices.graph.inputs
    }
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])[:3]
    return InfeasibleError(
        where="memory cap",
        found=f"{show_bytes(cap)} per device",
        wanted=f"at least {show_bytes(minimum)} ({minimum} bytes)" if minimum >= 0 else "more",
        remedy="; ".join(
            (
                "raise --memory or use more devices",
                *(remedies(found.priced, recompute, offload) if found else ()),
                "the largest are "
                + ", ".join(f"{name} ({show_bytes(nbytes)} unsharded)" for name, nbytes in largest),
            )
        ),
        least=minimum if minimum >= 0 else None,
    )
