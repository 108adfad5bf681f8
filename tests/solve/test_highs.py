"""Relaxed or whole, the solver's values are those of the program's variables."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import highspy
import pytest

from autopar.errors import SolverError
from autopar.solve import highs
from autopar.solve.highs import solve
from autopar.solve.linear_program import LinearProgram, SolverAnswer
from autopar.solve.program.chosen import of_chosen

ROOT = Path(__file__).parents[2]
COUNT = 25  # more than have one digit


def shares() -> LinearProgram:
    """Of pair k at least k/20 + 3/2, the first of them, which is cheaper, at most 3/2; the others are in no
    row."""
    program = LinearProgram()
    for number in range(COUNT):
        program.variable(float(number % 5), integer=number % 5 != 3, upper=4.0)
    for number in range(0, COUNT, 5):
        program.at_least([(1.0, number), (0.5, number + 1), (0.5, number + 1)], 1.5 + number / 20)
        program.at_most([(1.0, number)], 1.5)
    return program


@pytest.mark.parametrize("relaxed", [True, False])
def test_values_are_those_of_the_variables(relaxed: bool) -> None:
    answer = solve(shares(), relaxed=relaxed)
    assert answer.values is not None
    assert answer.status == "optimal"
    for number in range(0, COUNT, 5):
        first = 1.5 if relaxed else 1.0
        second = 1.5 + number / 20 - first
        assert answer.values[number] == pytest.approx(first)
        assert answer.values[number + 1] == pytest.approx(second if relaxed else math.ceil(second))
    assert answer.cost == pytest.approx(answer.bound)


ONE = """
from autopar.solve.linear_program import LinearProgram
from autopar.solve.highs import solve

program = LinearProgram()
program.at_least([(1.0, program.variable(1.0, integer=True, upper=2.0))], 0.5)
print([solve(program, relaxed=relaxed).cost for relaxed in {order}], flush=True)
"""


@pytest.mark.parametrize(("order", "costs"), [([True, False], "[0.5, 1.0]"), ([False, True], "[1.0, 0.5]")])
def test_the_first_solver_of_a_process_prints_nothing(order: list[bool], costs: str) -> None:
    """HiGHS writes past Python, so what is looked at is what leaves the process."""
    done = subprocess.run(
        [sys.executable, "-c", ONE.format(order=order)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"{costs}\n" and not done.stderr


def test_what_has_no_answer_is_infeasible() -> None:
    program = shares()
    program.at_least([(1.0, 0), (1.0, 1)], 6.0)
    assert solve(program).status == solve(program, relaxed=True).status == "infeasible"


def test_a_row_of_nothing_counts() -> None:
    program = shares()
    program.at_most([], 1.0)
    assert solve(program).status == solve(program, relaxed=True).status == "optimal"
    program.at_least([], 1.0)
    assert solve(program).status == solve(program, relaxed=True).status == "infeasible"


@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1.0, 1e6])
def test_costs_of_any_unit_give_the_same_answer(unit: float) -> None:
    """Costs below the solver's tolerance would be nothing to it, and a program with a free ray unbounded."""
    program = LinearProgram()
    cheap, memory_price = (program.variable(cost * unit) for cost in (1.0, 3.0))
    whole = program.variable(2.5 * unit, integer=True, upper=1.0)
    program.at_least([(1.0, cheap), (1.0, memory_price), (1.0, whole)], 1.5)
    program.at_least([(1.0, memory_price), (1.0, whole)], 1.0)
    for relaxed in (True, False):
        answer = solve(program, relaxed=relaxed)
        assert answer.status == "optimal"
        assert answer.cost == pytest.approx(3.0 * unit) and answer.bound == pytest.approx(3.0 * unit)


def mixed(*, digits: int) -> LinearProgram:
    """Two ways that cost 1, of which the second is cheaper in digits far below, and one that costs 2."""
    program = LinearProgram()
    small = 10.0**-digits
    ways = [program.variable(cost, integer=True, upper=1.0) for cost in (1.0, 1.0, 2.0)]
    extras = [program.variable(cost) for cost in (3 * small, small)]
    program.equal([(1.0, way) for way in ways], 1.0)
    for way, extra in zip(ways, extras, strict=False):
        program.at_least([(1.0, extra), (-1.0, way)], 0.0)
    return program


@pytest.mark.parametrize("digits", [3, 8, 11, 15])
def test_digits_that_are_too_small_for_one_objective_decide_among_equals(digits: int) -> None:
    program = mixed(digits=digits)
    few = program.of_few_digits()
    paid = [cost for cost in few.costs if cost]
    assert max(paid) / min(paid) <= 1e9
    assert (few is program) == (digits <= 8)
    for relaxed in (True, False):
        answer = solve(program, relaxed=relaxed, gap=0.0)
        assert answer.values is not None
        assert answer.values[:3] == pytest.approx((0.0, 1.0, 0.0), abs=1e-6)
        assert answer.bound <= answer.cost * (1 + 1e-9) and answer.cost == pytest.approx(1 + 10.0**-digits)


@pytest.mark.parametrize(("gap", "solves"), [(1e-6, 1), (0.0, 2)])
def test_costs_that_come_to_less_than_the_gap_are_not_solved_for_again(
    monkeypatch: pytest.MonkeyPatch, gap: float, solves: int
) -> None:
    """A row that bounds the cost would make a relaxation fractional that was whole."""
    believed, asked = highs._believed, list[LinearProgram]()

    def counted(program: LinearProgram, **options: Any) -> SolverAnswer:
        asked.append(program)
        return believed(program, **options)

    monkeypatch.setattr(highs, "_believed", counted)
    program = mixed(digits=11)
    assert solve(program, relaxed=True, gap=gap).cost == pytest.approx(1.0) and len(asked) == solves


def test_ties_are_told_apart_only_among_answers_that_cost_least() -> None:
    """The dear way has no ties at all."""
    program = LinearProgram()
    ways = [program.variable(cost, integer=True, upper=1.0) for cost in (5.0, 5.0, 5.1)]
    program.equal([(1.0, way) for way in ways], 1.0)
    program.ties = [7.0, 6.0, 0.0]
    answer = solve(program)
    assert answer.values == pytest.approx((0.0, 1.0, 0.0)) and answer.cost == pytest.approx(5.0)


@pytest.mark.parametrize("verdict", ["unbounded", "infeasible"])
def test_a_false_verdict_is_not_believed(monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
    """Whatever presolve may say of it, costs of 0 or more are not unbounded, and what has a plan has one."""
    read, asked = highs._read, list[bool]()

    def misread(model: highspy.Highs, program: LinearProgram, *, whole: bool) -> SolverAnswer | None:
        asked.append(model.getOptionValue("presolve")[1] == "off")
        if asked[-1]:
            return read(model, program, whole=whole)
        return SolverAnswer(None, math.inf, math.inf, "infeasible") if verdict == "infeasible" else None

    monkeypatch.setattr(highs, "_read", misread)
    for relaxed in (True, False):
        assert solve(mixed(digits=3), relaxed=relaxed).cost == pytest.approx(1.001)
    assert asked == [False, True] * 2


def test_what_pays_for_ever_is_unbounded_and_what_ends_is_not() -> None:
    program = LinearProgram()
    program.at_least([(1.0, program.variable(-1.0, upper=3.0))], 0.0)
    assert solve(program).cost == pytest.approx(-3.0) and not program.can_fall_for_ever()
    program.variable(-1.0)
    assert program.can_fall_for_ever()
    with pytest.raises(SolverError, match="Unbounded"):
        solve(program)


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_costs_that_are_no_numbers_are_refused_before_they_are_solved(cost: float) -> None:
    program = shares()
    program.costs[3] = cost
    with pytest.raises(SolverError, match="no number"):
        solve(program)


def knapsack(count: int) -> LinearProgram:
    """As much as fits of things whose worth and weight are nearly the same, in many equal ways."""
    program = LinearProgram()
    things = [(program.variable(-(7.0 + n % 5), integer=True, upper=1.0), 6.5 + n % 6) for n in range(count)]
    program.at_most([(weight, thing) for thing, weight in things], 3.7 * count)
    return program


def test_a_time_limit_is_kept_but_for_the_least_that_a_solver_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for least, limit, status in ((1e-9, 60.0, "optimal"), (60.0, 1e-9, "optimal"), (60.0, None, "optimal")):
        monkeypatch.setattr("autopar.solve.highs.LEAST_SOLVE_SECONDS", least)
        assert solve(knapsack(30), time_limit=limit).status == status
    monkeypatch.setattr("autopar.solve.highs.LEAST_SOLVE_SECONDS", 1e-9)
    assert solve(knapsack(30), time_limit=1e-9).status == "time_limit"


def test_little_work_ends_at_the_same_answer_whatever_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solve.highs.LEAST_LOOKS", 1)
    program = knapsack(60)
    program.at_most([(6.5 + n % 7, n) for n in range(0, 60, 2)], 90.3)
    program.at_most([(4.5 + n % 5, n) for n in range(0, 60, 3)], 50.7)
    whole = solve(program, gap=0.0)
    ended = solve(program, gap=0.0, work=3.0)
    monkeypatch.setattr("autopar.solve.highs.time.monotonic", partial(next, iter(range(0, 10**9, 10**3))))
    assert solve(program, gap=0.0, work=3.0) == ended
    assert (ended.status, ended.work, whole.status) == ("time_limit", 3.0, "optimal")
    assert whole.work > 3.0


def test_little_work_ends_a_relaxation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solve.highs.LEAST_ITERATIONS", 1)
    monkeypatch.setattr("autopar.solve.highs.WAYS", (highs.WITHOUT_PRESOLVE,))
    assert solve(shares(), relaxed=True, work=1e-9).status == "time_limit"
    assert solve(shares(), relaxed=True).status == "optimal"


def test_other_costs_are_solved_from_where_the_relaxation_ended() -> None:
    first = shares()
    before = solve(first, relaxed=True)
    (kept,) = first.solved
    other = replace(first, costs=[5.0 - cost for cost in first.costs])
    again, fresh = solve(other, relaxed=True), solve(replace(other, solved=[]), relaxed=True)
    assert other.solved is first.solved and kept[0] is other.solved[0][0]  # type: ignore[index]
    assert again.cost == pytest.approx(fresh.cost) != pytest.approx(before.cost)
    assert again.bound == pytest.approx(fresh.bound)
    assert solve(first, relaxed=True).cost == pytest.approx(before.cost)


def test_a_program_with_other_rows_is_not_solved_from_there() -> None:
    program = shares()
    solve(program, relaxed=True)
    program.at_least([(1.0, COUNT - 1)], 2.0)
    assert solve(program, relaxed=True).values[COUNT - 1] == pytest.approx(2.0)  # type: ignore[index]
    assert program.for_ties(1.0).solved is not program.solved


def test_branching_never_searches_within_its_search() -> None:
    """Those searches take longer than all else, and no limit of work ends them."""
    looks = highs.Looks(math.inf)
    for options in highs.WAYS:
        model = highs._integer(knapsack(5), gap=0.0, seconds=60.0, looks=looks, options=options)
        for within in ("rens", "rins", "root_reduced_cost"):
            status, value = model.getOptionValue(f"mip_heuristic_run_{within}")
            assert (status, value) == (highspy.HighsStatus.kOk, False)


def test_answers_of_what_the_relaxation_chose_are_some_of_the_whole_programs() -> None:
    program = knapsack(30)
    program.at_most([(6.5 + n % 7, n) for n in range(0, 30, 2)], 50.3)
    relaxed, whole = solve(program, relaxed=True), solve(program, gap=0.0)
    few = of_chosen(program, relaxed)
    assert relaxed.values is not None
    assert 0 < few.uppers.count(0.0) == sum(value <= 1e-6 for value in relaxed.values)
    assert solve(few, relaxed=True).cost == pytest.approx(relaxed.cost)
    near = solve(few, gap=0.0)
    assert relaxed.cost - 1e-9 <= whole.cost <= near.cost + 1e-9 < 0.0
    assert program.uppers.count(0.0) == 0


def test_rows_of_bytes_are_handed_over_in_a_unit_of_their_own() -> None:
    program = knapsack(6)
    program.at_most([(3e9 + n, n) for n in range(6)], 7e9)
    plain, matrix = program.matrix(), program.matrix().in_units()
    row = slice(matrix.starts[-2], matrix.starts[-1])
    unit = plain.highs[-1] / matrix.highs[-1]
    assert 0.5 <= matrix.coefficients[row].max() < 1.0
    assert math.log2(unit).is_integer(), "nothing is rounded"
    assert (matrix.coefficients[row] * unit == plain.coefficients[row]).all()
    assert (matrix.coefficients[: row.start] == plain.coefficients[: row.start]).all(), "others stay"
    assert (matrix.lows[-1], plain.lows[-1]) == (-math.inf, -math.inf)
    assert solve(program, gap=0.0).values is not None
