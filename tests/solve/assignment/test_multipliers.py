"""The next multiplier is where the lines of known assignments meet, and leads to the best bound."""

from __future__ import annotations

from random import Random

import pytest

from autopar.solve.assignment.multipliers import LagrangianLine, MultiplierSearch, highest, line_of


def assignments(seed: int) -> list[LagrangianLine]:
    """Lines of which those cost less whose sums exceed more."""
    random = Random(seed)
    excesses = [random.uniform(-5, 5) for _ in range(100)]
    return [
        LagrangianLine(12 - each / 2 + 0.1 * each * each + random.random() / 4, each) for each in excesses
    ]


def take(lines: list[LagrangianLine], search: MultiplierSearch, most: int) -> float:
    """Answer the search with the cheapest of the lines until it is over; the best bound found."""
    bound = 0.0
    for _ in range(most):
        best = min(lines, key=lambda line: line.at(search.multiplier))
        cost = best.at(search.multiplier)
        bound = max(bound, cost)
        search.note(cost, best.base + max(0.0, best.excess), shows=best.excess > 0)
        if search.is_over:
            break
    return bound


def test_two_lines_meet_where_they_cost_the_same() -> None:
    hides, shows = LagrangianLine(10.0, -4.0), LagrangianLine(6.0, 4.0)  # 10 - 4 m = 6 + 4 m
    assert highest([hides, shows]) == (0.5, 8.0)
    assert highest([hides]) == (0.0, 10.0)
    assert highest([shows]) == (1.0, 10.0)


def test_a_line_is_known_by_what_an_assignment_costs_and_takes() -> None:
    for line in (LagrangianLine(10.0, -4.0), LagrangianLine(6.0, 4.0)):
        for multiplier in (0.25, 0.75):
            seconds = line.base + max(0.0, line.excess)
            found = line_of(multiplier, cost=line.at(multiplier), seconds=seconds, shows=line.excess > 0)
            assert (found.base, found.excess) == pytest.approx((line.base, line.excess))


@pytest.mark.parametrize("seed", range(20))
def test_the_search_ends_at_the_best_bound(seed: int) -> None:
    lines = assignments(seed)
    _, best = highest(lines)
    search = MultiplierSearch(0.0)
    assert take(lines, search, most=30) == pytest.approx(best, rel=1e-9)
    assert search.is_over and len(search.tried) <= 10


def test_it_ends_sooner_where_a_gap_is_allowed() -> None:
    lines = assignments(1)
    near, exact = MultiplierSearch(0.02), MultiplierSearch(0.0)
    bound, best = take(lines, near, most=30), take(lines, exact, most=30)
    assert best * (1 - 0.02) <= bound <= best
    assert len(near.tried) < len(exact.tried)


def test_where_costs_are_no_lines_it_bisects() -> None:
    search, tried = MultiplierSearch(0.0, bisects=True), []
    for shows in (False, True, True, False):
        tried.append(search.multiplier)
        search.note(1.0, 2.0, shows=shows)
    assert tried == [1.0, 0.0, 0.5, 0.75] and not search.is_over
    assert search.multiplier == 0.625
