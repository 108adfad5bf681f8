"""The one place that talks to pulp: a LinearProgram in, an Answer out, by HiGHS.

Status and bound are read from HiGHS itself: pulp says "Optimal" for an incumbent at the time limit.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import highspy
import pulp

from autopar.errors import SolverError
from autopar.ilp.linear_program import Answer, LinearProgram


def solve(
    program: LinearProgram, *, relaxed: bool = False, gap: float = 1e-6, time_limit: float | None = None
) -> Answer:
    """Minimise `program`; `relaxed` drops the integrality.

    `gap` is relative, `time_limit` in seconds. Raises SolverError if the solver fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces PuLP 4 at every variable
        problem, variables = _build(program, relaxed=relaxed)
    options: dict[str, Any] = {"msg": False, "gapRel": gap, "threads": 1}
    if time_limit is not None:
        options["timeLimit"] = max(0.1, time_limit)
    solver = pulp.HiGHS(**options)
    problem.solve(solver)
    return _read(problem.solverModel, variables, program, relaxed=relaxed, gap=gap)


def _build(program: LinearProgram, *, relaxed: bool) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(
            f"v{index}",
            0,
            None if math.isinf(upper) else upper,
            pulp.LpInteger if whole and not relaxed else pulp.LpContinuous,
        )
        for index, (upper, whole) in enumerate(zip(program.uppers, program.integer, strict=True))
    ]
    problem += pulp.LpAffineExpression(
        [(variables[index], cost) for index, cost in enumerate(program.costs) if cost]
    )
    for number, row in enumerate(program.rows):
        terms: dict[pulp.LpVariable, float] = {}
        for coefficient, index in row.terms:
            terms[variables[index]] = terms.get(variables[index], 0.0) + coefficient
        expression = pulp.LpAffineExpression(terms)
        if row.low == row.high:
            problem += pulp.LpConstraint(expression, pulp.LpConstraintEQ, f"r{number}", row.low)
        elif math.isinf(row.low):
            problem += pulp.LpConstraint(expression, pulp.LpConstraintLE, f"r{number}", row.high)
        else:
            problem += pulp.LpConstraint(expression, pulp.LpConstraintGE, f"r{number}", row.low)
    return problem, variables


def _read(
    model: highspy.Highs,
    variables: list[pulp.LpVariable],
    program: LinearProgram,
    *,
    relaxed: bool,
    gap: float,
) -> Answer:
    status, info = model.getModelStatus(), model.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Answer(None, math.inf, math.inf, "infeasible")
    if status not in (kinds.kOptimal, kinds.kTimeLimit, kinds.kInterrupt, kinds.kSolutionLimit):
        raise SolverError(
            where="HiGHS",
            found=model.modelStatusToString(status),
            wanted="an answer",
            remedy="report this model; --mesh or --force make the program smaller",
        )
    whole = any(program.integer) and not relaxed
    bound = info.mip_dual_bound if whole else info.objective_function_value
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not found:
        return Answer(None, math.inf, bound if whole else -math.inf, "time_limit")
    values = tuple(float(variable.varValue or 0.0) for variable in variables)
    cost = sum(coefficient * value for coefficient, value in zip(program.costs, values, strict=True))
    if status != kinds.kOptimal:
        return Answer(values, cost, bound if whole else -math.inf, "time_limit")
    proven = not whole or cost - bound <= 1e-6 * max(abs(cost), 1e-12)
    return Answer(values, cost, bound, "optimal" if proven else "gap_limit")
