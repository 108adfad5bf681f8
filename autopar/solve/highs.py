"""The one place that talks to solvers: a LinearProgram in, a SolverAnswer out, by HiGHS.

Relaxations, which are solved first and nearly always suffice, are handed to HiGHS as arrays; integer
programs are written in PuLP. Status and bound are read from HiGHS itself: PuLP says "Optimal" for an
incumbent at the time limit.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias, cast

import highspy
import numpy as np
import pulp
from numpy.typing import NDArray

from autopar.errors import SolverError
from autopar.solve.linear_program import COST_DIGITS, LinearProgram, SolverAnswer

NAME_DIGITS = 9  # of a variable's number: PuLP hands variables over sorted by name
LARGEST_COST = 1e3  # cost: HiGHS takes less than 1e-7 for nothing, and so may a plan of microseconds be
LEAST_SOLVE_SECONDS = 0.1  # even past the time limit: a small program is solved all the same
COST_TOLERANCE = 1e-9  # of a cost: what costs no more costs the same
# Work is counted, not timed, so that a loaded machine finds the same plan: in looks of HiGHS at its limits
# while it branches, times rows; of a relaxation so many iterations of the simplex method count as a look.
SECOND = 2e5  # about what is done in one
ITERATIONS, MOST_ITERATIONS = 2000, 2**31 - 1
LEAST_LOOKS, LEAST_ITERATIONS = 100, 1000  # even past the limit
TIES_GAP, TIES_WORK = 1e-2, 5 * SECOND  # of what only decides among answers of equal cost
# What HiGHS is told, one after the other, until its verdict can be believed.
Options: TypeAlias = Mapping[str, str | int]
WITHOUT_PRESOLVE: Options = {"presolve": "off"}
FIRST: Options = {}
WAYS: tuple[Options, ...] = (
    FIRST,
    WITHOUT_PRESOLVE,
    {"presolve": "off", "simplex_strategy": 4},  # primal
    {"presolve": "on", "solver": "ipm"},
)
# Searches within the search, of programs nearly as large, whose work isn't counted: of 60,000 variables 32 of
# them took 55 of 59 s, and two nodes proved the best plan without them in 4.
WITHOUT_SEARCHES_WITHIN: Options = {
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_root_reduced_cost": False,
}
CONFIRM_WORK, CONFIRM_TIMES = SECOND, 2.0  # at most, and of what the verdict took, to see that it holds


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


class Looks:
    """Counts how often HiGHS looks at its limits while it branches; after `most` times it shall end."""

    def __init__(self, most: float) -> None:
        self.count, self.most = 0, most

    def __call__(self, event: highspy.HighsCallbackEvent) -> None:
        self.count += 1
        if self.count >= self.most:
            event.interrupt()


class PulpOn(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's way to HiGHS, to a model with its options that is there already: its own would print."""

    def __init__(self, model: SilentHighs) -> None:
        super().__init__(msg=False)
        self.model = model

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        lp.solverModel = self.model


def solve(
    program: LinearProgram,
    *,
    relaxed: bool = False,
    gap: float = 1e-6,
    time_limit: float | None = None,
    work: float = math.inf,
) -> SolverAnswer:
    """Minimise `program`; `relaxed` drops the integrality.

    Of answers of equal cost it is one whose ties cost least, if that is found in time, and if costs that are
    too small for one objective come to more than the `gap`, which is relative. `time_limit` is in seconds;
    after so much `work` (see `SECOND`) the best so far is taken as well.
    Raises SolverError if the solver fails.
    """
    _check(program)
    whole = any(program.integer) and not relaxed
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    few = program.of_few_digits()
    answer = _believed(few, whole=whole, gap=gap, deadline=deadline, work=work)
    if answer.values is None or not any(few.ties):
        return answer
    values = answer.values
    if not any(program.ties) and few.cost_of_ties(values) <= gap * abs(answer.cost):  # they cost nothing less
        return replace(answer, cost=program.cost_of(values))
    with contextlib.suppress(SolverError):  # there is an answer already
        limited = few.for_ties(answer.cost + COST_TOLERANCE * abs(answer.cost))
        second = _believed(limited, whole=whole, gap=TIES_GAP, deadline=deadline, work=TIES_WORK)
        values = values if second.values is None else second.values
    return replace(answer, values=values, cost=program.cost_of(values))


def _check(program: LinearProgram) -> None:
    """Raise SolverError for a program in which a number is none."""
    costs, ends = (program.costs, program.ties), (program.uppers, program.lows, program.highs)
    finite = all(np.isfinite(np.asarray(each, dtype=np.float64)).all() for each in costs)
    if not finite or any(np.isnan(np.asarray(each, dtype=np.float64)).any() for each in ends):
        raise SolverError(
            where="HiGHS",
            found="a cost or a bound that is no number",
            wanted="finite costs",
            remedy="report this model and its cluster's file",
        )


def _believed(
    program: LinearProgram, *, whole: bool, gap: float, deadline: float, work: float
) -> SolverAnswer:
    """The first answer that can be believed of several ways of solving.

    A program is unbounded only if what pays has no end, and infeasible only if it is so without presolve,
    too, unless that takes long.
    """
    scale = LARGEST_COST / max((abs(cost) for cost in program.costs if cost), default=LARGEST_COST)
    scaled = replace(program, costs=[scale * cost for cost in program.costs])

    def ask(options: Options, work: float) -> tuple[highspy.Highs, SolverAnswer | None, float]:
        seconds = max(LEAST_SOLVE_SECONDS, deadline - time.monotonic())
        rows = max(1, len(scaled.lows))
        looks = Looks(max(LEAST_LOOKS, work / rows))
        if whole:
            model = _integer(scaled, gap=gap, seconds=seconds, looks=looks, options=options)
            return model, _read(model, scaled, whole=whole), float(rows * looks.count)
        model = _relaxed(scaled, seconds, max(LEAST_ITERATIONS, ITERATIONS * work / rows), options)
        done = max(0, model.getInfo().simplex_iteration_count) / ITERATIONS
        return model, _read(model, scaled, whole=whole), rows * done

    spent = 0.0
    for number, options in enumerate(WAYS):
        model, answer, taken = ask(options, work - spent)
        spent += taken
        if answer is None:
            continue
        if answer.status == "infeasible" and number == 0:
            _, second, taken = ask(WITHOUT_PRESOLVE, max(CONFIRM_WORK, CONFIRM_TIMES * taken))
            answer = second if second is not None and second.values is not None else answer
            spent += taken
        return replace(_rescaled(answer, 1 / scale), work=spent)
    raise _failed(model, model.getModelStatus())


class Relaxation:
    """A program without integrality that is solved again and again, for other costs."""

    def __init__(self, program: LinearProgram) -> None:
        self.model = _loaded(program)

    def least(self, costs: NDArray[np.float64]) -> tuple[float, tuple[float, ...]]:
        """The least cost, and values that have it; raises SolverError if there are none."""
        largest = float(np.abs(costs).max(initial=0.0))
        scale = LARGEST_COST / max(largest, 1e-300)
        scaled = np.where(np.abs(costs) < 10.0**-COST_DIGITS * largest, 0.0, scale * costs)
        self.model.changeColsCost(len(costs), np.arange(len(costs), dtype=np.int32), scaled)
        for options in WAYS:
            _set(self.model, options)
            self.model.run()
            status = self.model.getModelStatus()
            if status == highspy.HighsModelStatus.kOptimal:
                break
            self.model.clearSolver()
        else:
            raise _failed(self.model, status)
        least = float(self.model.getInfo().objective_function_value) / scale
        return least, tuple(self.model.getSolution().col_value)


def _rescaled(answer: SolverAnswer, unit: float) -> SolverAnswer:
    reduced = tuple(unit * each for each in answer.reduced)
    return replace(answer, cost=unit * answer.cost, bound=unit * answer.bound, reduced=reduced)


def _set(model: highspy.Highs, options: Options) -> None:
    for name, value in options.items():
        model.setOptionValue(name, value)


def _relaxed(program: LinearProgram, seconds: float, iterations: float, options: Options) -> highspy.Highs:
    model = _ended(program) if options == FIRST else None
    if model is None:
        model = _loaded(program)
        _set(model, options)
    most = MOST_ITERATIONS if iterations == math.inf else round(min(iterations, MOST_ITERATIONS))
    model.setOptionValue("simplex_iteration_limit", most)
    model.setOptionValue("time_limit", model.getRunTime() + seconds)  # it counts all runs of a model
    model.run()
    if options == FIRST:
        program.solved[:] = [(model, len(program.lows))]
    return model


def _ended(program: LinearProgram) -> highspy.Highs | None:
    """The model in which a program that differs by its costs alone was solved, with these costs: from where
    it ended, the least cost is a fraction of the way. None if there was none."""
    for known in program.solved:
        model, rows = cast(tuple[highspy.Highs, int], known)
        columns = len(program.costs)
        if (model.getNumCol(), rows) == (columns, len(program.lows)):
            model.changeColsCost(columns, np.arange(columns, dtype=np.int32), np.asarray(program.costs))
            return model
    return None


def _loaded(program: LinearProgram) -> highspy.Highs:
    matrix = program.matrix().in_units()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.costs), len(program.lows)
    lp.col_cost_ = np.asarray(program.costs)
    lp.col_lower_, lp.col_upper_ = np.zeros(len(program.costs)), np.asarray(program.uppers)
    lp.row_lower_, lp.row_upper_ = matrix.lows, matrix.highs
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_ = matrix.starts, matrix.variables
    lp.a_matrix_.value_ = matrix.coefficients
    model = SilentHighs()
    model.passModel(lp)
    return model


def _integer(
    program: LinearProgram, *, gap: float, seconds: float, looks: Looks, options: Options
) -> highspy.Highs:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces PuLP 4 at every variable
        problem = _written(program)
    model = SilentHighs()
    _set(model, {**WITHOUT_SEARCHES_WITHIN, **options})
    model.setOptionValue("mip_rel_gap", gap)
    model.setOptionValue("time_limit", seconds)
    model.cbMipInterrupt.subscribe(looks)
    problem.solve(PulpOn(model))
    return model


def _written(program: LinearProgram) -> pulp.LpProblem:
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(
            f"v{index:0{NAME_DIGITS}}",
            0,
            None if math.isinf(upper) else upper,
            pulp.LpInteger if whole else pulp.LpContinuous,
        )
        for index, (upper, whole) in enumerate(zip(program.uppers, program.integer, strict=True))
    ]
    # Each is named here, if need be with 0, so that HiGHS has them all: PuLP hands over what it has met.
    problem += pulp.LpAffineExpression(list(zip(variables, program.costs, strict=True)))
    matrix = program.matrix().in_units()
    for number, (low, high) in enumerate(zip(matrix.lows.tolist(), matrix.highs.tolist(), strict=True)):
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


def _read(model: highspy.Highs, program: LinearProgram, *, whole: bool) -> SolverAnswer | None:
    """Read the solver's answer; None for a failure, and for a verdict that bounds do not allow."""
    status, info = model.getModelStatus(), model.getInfo()
    kinds = highspy.HighsModelStatus
    if status == kinds.kInfeasible:
        return SolverAnswer(None, math.inf, math.inf, "infeasible")
    if status == kinds.kUnboundedOrInfeasible and not program.can_fall_for_ever():
        return SolverAnswer(None, math.inf, math.inf, "infeasible")
    limits = (kinds.kTimeLimit, kinds.kInterrupt, kinds.kSolutionLimit, kinds.kIterationLimit)
    if status not in (kinds.kOptimal, *limits):
        return None
    bound = info.mip_dual_bound if whole else info.objective_function_value
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not found:
        return SolverAnswer(None, math.inf, bound if whole else -math.inf, "time_limit")
    values = tuple(model.getSolution().col_value)
    assert len(values) == len(program.costs), "HiGHS has the program's variables"
    cost = program.cost_of(values)
    if status != kinds.kOptimal:
        return SolverAnswer(values, cost, bound if whole else -math.inf, "time_limit")
    proven = not whole or cost - bound <= 1e-6 * max(abs(cost), 1e-12)
    reduced = () if whole else tuple(model.getSolution().col_dual)
    return SolverAnswer(values, cost, bound, "optimal" if proven else "gap_limit", reduced)


def _failed(model: highspy.Highs, status: highspy.HighsModelStatus) -> SolverError:
    return SolverError(
        where="HiGHS",
        found=model.modelStatusToString(status),
        wanted="an answer",
        remedy="report this model; --mesh or --force make the program smaller",
    )
