"""Relaxed or whole, the solver's values are those of the program's variables."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.solve.highs import solve
from autopar.solve.linear_program import LinearProgram

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
    cheap, dear = (program.variable(cost * unit) for cost in (1.0, 3.0))
    whole = program.variable(2.5 * unit, integer=True, upper=1.0)
    program.at_least([(1.0, cheap), (1.0, dear), (1.0, whole)], 1.5)
    program.at_least([(1.0, dear), (1.0, whole)], 1.0)
    for relaxed in (True, False):
        answer = solve(program, relaxed=relaxed)
        assert answer.status == "optimal"
        assert answer.cost == pytest.approx(3.0 * unit) and answer.bound == pytest.approx(3.0 * unit)


def knapsack(count: int) -> LinearProgram:
    """As much as fits of things whose worth and weight are nearly the same, in many equal ways."""
    program = LinearProgram()
    things = [(program.variable(-(7.0 + n % 5), integer=True, upper=1.0), 6.5 + n % 6) for n in range(count)]
    program.at_most([(weight, thing) for thing, weight in things], 3.7 * count)
    return program


def test_a_time_limit_is_kept_but_for_the_least_that_a_solver_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for least, limit, status in ((1e-9, 60.0, "optimal"), (60.0, 1e-9, "optimal"), (60.0, None, "optimal")):
        monkeypatch.setattr("autopar.solve.highs.LEAST_SECONDS", least)
        assert solve(knapsack(30), time_limit=limit).status == status
    monkeypatch.setattr("autopar.solve.highs.LEAST_SECONDS", 1e-9)
    assert solve(knapsack(30), time_limit=1e-9).status == "time_limit"
