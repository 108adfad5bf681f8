"""The one place that talks to solvers: a LinearProgram in, an Answer out, by HiGHS.

Relaxations, which are solved first and nearly always suffice, are handed to HiGHS as arrays; integer
programs are written in PuLP. Status and bound are read from HiGHS itself: PuLP says "Optimal" for an
incumbent at the time limit.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import highspy
import numpy as np
import pulp
from numpy.typing import NDArray

from autopar.errors import SolverError
from autopar.solve.linear_program import Answer, LinearProgram

DIGITS = 9  # of a variable's number: PuLP hands variables over sorted by name
LARGEST = 1e3  # cost: HiGHS takes less than 1e-7 for nothing, and so may a plan of microseconds be
LEAST_SECONDS = 0.1  # even past the time limit: a small program is solved all the same


class SilentHighs(highspy.Highs):
    """HiGHS with one thread that prints nothing, neither while it solves nor its banner.

    Its constructor enables callbacks, which is what prints the licence of the first model of a process,
    before anybody can set an option of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.setOptionValue("threads", 1)

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class PulpOn(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's way to HiGHS, to a model with its options that is there already: its own would print."""

    def __init__(self, model: SilentHighs) -> None:
        super().__init__(msg=False)
        self.model = model

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        lp.solverModel = self.model


def solve(
    program: LinearProgram, *, relaxed: bool = False, gap: float = 1e-6, time_limit: float | None = None
) -> Answer:
    """Minimise `program`; `relaxed` drops the integrality.

    `gap` is relative, `time_limit` in seconds. Raises SolverError if the solver fails.
    """
    whole = any(program.integer) and not relaxed
    seconds = math.inf if time_limit is None else max(LEAST_SECONDS, time_limit)
    scale = LARGEST / max((abs(cost) for cost in program.costs if cost), default=LARGEST)
    scaled = replace(program, costs=[scale * cost for cost in program.costs])
    model = _integer(scaled, gap=gap, seconds=seconds) if whole else _relaxed(scaled, seconds)
    return _rescaled(_read(model, scaled, whole=whole), 1 / scale)


class Relaxation:
    """A program without integrality that is solved again and again, for other costs."""

    def __init__(self, program: LinearProgram) -> None:
        self.model = _loaded(program)

    def least(self, costs: NDArray[np.float64]) -> tuple[float, tuple[float, ...]]:
        """The least cost, and values that have it; raises SolverError if there are none."""
        scale = LARGEST / max(float(np.abs(costs).max(initial=0.0)), 1e-300)
        self.model.changeColsCost(len(costs), np.arange(len(costs), dtype=np.int32), scale * costs)
        self.model.run()
        status = self.model.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise _failed(self.model, status)
        least = float(self.model.getInfo().objective_function_value) / scale
        return least, tuple(self.model.getSolution().col_value)


def _rescaled(answer: Answer, unit: float) -> Answer:
    reduced = tuple(unit * each for each in answer.reduced)
    return replace(answer, cost=unit * answer.cost, bound=unit * answer.bound, reduced=reduced)


def _relaxed(program: LinearProgram, seconds: float) -> highspy.Highs:
    model = _loaded(program)
    model.setOptionValue("time_limit", seconds)
    model.run()
    return model


def _loaded(program: LinearProgram) -> highspy.Highs:
    matrix = program.matrix()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.costs), len(program.lows)
    lp.col_cost_ = np.asarray(program.costs)
    lp.col_lower_, lp.col_upper_ = np.zeros(len(program.costs)), np.asarray(program.uppers)
    lp.row_lower_, lp.row_upper_ = np.asarray(program.lows), np.asarray(program.highs)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_ = matrix.starts, matrix.variables
    lp.a_matrix_.value_ = matrix.coefficients
    model = SilentHighs()
    model.passModel(lp)
    return model


def _integer(program: LinearProgram, *, gap: float, seconds: float) -> highspy.Highs:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces PuLP 4 at every variable
        problem = _written(program)
    model = SilentHighs()
    model.setOptionValue("mip_rel_gap", gap)
    model.setOptionValue("time_limit", seconds)
    problem.solve(PulpOn(model))
    return model


def _written(program: LinearProgram) -> pulp.LpProblem:
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(
            f"v{index:0{DIGITS}}",
            0,
            None if math.isinf(upper) else upper,
            pulp.LpInteger if whole else pulp.LpContinuous,
        )
        for index, (upper, whole) in enumerate(zip(program.uppers, program.integer, strict=True))
    ]
    # Each is named here, if need be with 0, so that HiGHS has them all: PuLP hands over what it has met.
    problem += pulp.LpAffineExpression(list(zip(variables, program.costs, strict=True)))
    matrix = program.matrix()
    for number, (low, high) in enumerate(zip(program.lows, program.highs, strict=True)):
        own = slice(matrix.starts[number], matrix.starts[number + 1])
        terms = [
            (variables[index], float(coefficient))
            for index, coefficient in zip(matrix.variables[own], matrix.coefficients[own], strict=True)
        ]
        if low == high:
            kind, value = pulp.LpConstraintEQ, low
        elif math.isinf(low):
            kind, value = pulp.LpConstraintLE, high
        else:
            kind, value = pulp.LpConstraintGE, low
        problem += pulp.LpConstraint(pulp.LpAffineExpression(terms), kind, f"r{number}", value)
    return problem


def _read(model: highspy.Highs, program: LinearProgram, *, whole: bool) -> Answer:
    status, info = model.getModelStatus(), model.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Answer(None, math.inf, math.inf, "infeasible")
    if status not in (kinds.kOptimal, kinds.kTimeLimit, kinds.kInterrupt, kinds.kSolutionLimit):
        raise _failed(model, status)
    bound = info.mip_dual_bound if whole else info.objective_function_value
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not found:
        return Answer(None, math.inf, bound if whole else -math.inf, "time_limit")
    values = tuple(model.getSolution().col_value)
    assert len(values) == len(program.costs), "HiGHS has the program's variables"
    cost = sum(coefficient * value for coefficient, value in zip(program.costs, values, strict=True))
    if status != kinds.kOptimal:
        return Answer(values, cost, bound if whole else -math.inf, "time_limit")
    proven = not whole or cost - bound <= 1e-6 * max(abs(cost), 1e-12)
    reduced = () if whole else tuple(model.getSolution().col_dual)
    return Answer(values, cost, bound, "optimal" if proven else "gap_limit", reduced)


def _failed(model: highspy.Highs, status: highspy.HighsModelStatus) -> SolverError:
    return SolverError(
        where="HiGHS",
        found=model.modelStatusToString(status),
        wanted="an answer",
        remedy="report this model; --mesh or --force make the program smaller",
    )
