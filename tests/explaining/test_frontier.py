"""The frontier is plans that were solved under caps: leaner and slower, none slower than need be."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autopar.explaining.asked import AskedPlan
from autopar.explaining.frontier import SHARES, frontier
from autopar.results.plan.frontier import Frontier, Point, undominated
from autopar.results.plan.plan import Plan
from tests.explaining.test_explain import NODE, WHOLE, plan, target

OPTIONS: dict[str, Any] = WHOLE | {"gap": 1e-3}
GAPS = 4e-3  # of two solved plans


def around(found: Plan, seconds: float = 60.0, **options: Any) -> Frontier:
    return frontier(AskedPlan(target(), NODE, OPTIONS | options), found, seconds=seconds)


@cache
def whole() -> Frontier:
    return around(plan(gap=1e-3))


@pytest.mark.long
def test_points_are_leaner_and_slower_and_keep_to_their_caps() -> None:
    points = whole().points
    assert len(points) > 1 and points[0] == Point.of(plan(gap=1e-3))
    for before, after in zip(points, points[1:], strict=False):
        assert before.step_seconds <= after.step_seconds and before.peak_bytes > after.peak_bytes
        assert after.memory_cap is not None and after.peak_bytes <= after.memory_cap


@pytest.mark.long
def test_a_point_is_the_plan_that_is_found_under_its_cap() -> None:
    point = whole().points[1]
    alone = plan(gap=1e-3, memory=point.memory_cap)
    assert alone.step_seconds == pytest.approx(point.step_seconds, rel=GAPS)


@pytest.mark.slow
def test_under_a_cap_that_no_plan_meets_the_leanest_that_is_known_ends_it() -> None:
    found = whole()
    assert found.infeasible is not None and found.untried == 0
    assert min(point.peak_bytes for point in found.points) > found.infeasible


@pytest.mark.long
def test_a_plan_under_a_cap_has_the_faster_ones_beside_it() -> None:
    tight = plan(gap=1e-3, memory=whole().points[1].memory_cap)
    found = around(tight, memory=tight.memory_cap)
    assert found.points[0].memory_cap is None
    assert found.points[0].step_seconds == pytest.approx(whole().points[0].step_seconds, rel=GAPS)
    assert any(point.memory_cap == tight.memory_cap for point in found.points)


def test_without_time_the_plan_stands_alone() -> None:
    found = around(plan(gap=1e-3), seconds=0.0)
    assert found.points == (Point.of(plan(gap=1e-3)),) and found.untried == len(SHARES)


def test_what_is_slower_and_no_leaner_is_left_out() -> None:
    fast, slow, lean = Point(None, 1.0, 10, 0.0), Point(9, 2.0, 10, 0.0), Point(8, 3.0, 7, 0.0)
    assert undominated([lean, slow, fast]) == (fast, lean)
