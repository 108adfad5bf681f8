"""A comparison tells how well predictions and measured steps agree, where both are there."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.cluster import ClusterSpec
from autopar.results.comparison.comparison import Comparison, Measured, Row, spearman
from autopar.results.plan.plan import Plan
from tests.targets import mlp

FIGURES = {"accuracy", "rank_correlation", "regret"}


@cache
def serial_plan() -> Plan:
    model, x = mlp()
    return autopar.plan(model, ClusterSpec.local(1), (x,), measure=False)


def a_row(name: str, guess: float, seconds: float | None, nbytes: int = 1, state: int = 0) -> Row:
    measured = None if seconds is None else Measured(seconds, nbytes)
    plan = replace(serial_plan(), step_seconds=guess, peak_bytes=nbytes, state_bytes=state)
    return Row(name, plan, 2, measured=measured)


def test_accuracy_order_and_regret_are_those_of_the_rows_that_ran() -> None:
    rows = (
        a_row("batch", 1.0, 2.0),  # half of it
        a_row("filter", 3.0, 4.0),  # three quarters
        a_row("hybrid", 9.0, 3.0),  # three times too long: no accuracy at all
        a_row("serial", 7.0, None),
    )
    found = Comparison("", None, rows, "hybrid")
    assert found.accuracy == pytest.approx((0.5 + 0.75 + 0) / 3)
    assert found.rank_correlation == pytest.approx(0.5)  # 1 2 3 against 1 3 2
    assert found.regret == pytest.approx(0.5)
    assert found.as_dict().keys() >= FIGURES
    assert "41.7% of predicted" in str(found) and "50.0% of the chosen plan" in str(found)


def test_figures_that_cannot_be_told_are_none() -> None:
    one = Comparison("", None, (a_row("batch", 1.0, 2.0),), None)
    assert one.accuracy == 0.5 and one.rank_correlation is None and one.regret is None
    assert json.dumps(one.as_dict(), allow_nan=False)
    none = Comparison("", None, (a_row("batch", 1.0, None),), None)
    assert none.accuracy is None and not FIGURES & none.as_dict().keys()


def test_equal_values_share_their_rank() -> None:
    assert spearman([1, 2, 3], [10, 20, 21]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(3**0.5 / 2)  # ranks 1.5 1.5 3 against 1 2 3
    assert spearman([1, 2], [4, 3]) == pytest.approx(-1)  # two values rank as well as three
    assert spearman([1, 1, 2], [7, 7, 8]) == pytest.approx(1)
    assert spearman([5, 5], [1, 2]) is None and spearman([], []) is None
