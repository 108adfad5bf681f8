"""What is said of a plan is true: its gap, and that none is faster where it gives up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.program import Program
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import InfeasibleError
from autopar.solve.assignment import search
from autopar.solve.assignment.goal import Effort, Goal
from autopar.solve.assignment.least_memory import least
from autopar.solve.assignment.search import choose
from autopar.solve.choices.fold import fold
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.choices.space import build_space
from autopar.solve.highs import solve
from autopar.solve.linear_program import LinearProgram, SolverAnswer
from autopar.solve.program.solution import CutoffError, Solution
from tests.solve.brute_force import blocks, chain, random_prices, scores, small_space, unfolded

CLOSE = 1e-6


@pytest.mark.parametrize(
    ("seconds", "bound", "gap"),
    [(4.0, 3.0, 0.25), (0.5, 0.25, 0.5), (2.0, 2.0, 0.0), (2.0, 2.5, 0.0), (4.0, 0.0, 1.0), (0.0, 0.0, 0.0)],
)
def test_a_gap_is_the_share_of_a_plans_seconds_that_no_plan_may_save(
    seconds: float, bound: float, gap: float
) -> None:
    prices = random_prices(chain(), Mesh((2,)), Random(0))
    priced = PricedProgram(prices, Program(Mesh((2,)), {}, {}, {}, {}))
    assert Solution(priced, seconds, bound, "optimal", priced).gap == gap


def test_a_plan_of_unequal_blocks_that_may_be_faster_keeps_the_search_from_giving_up() -> None:
    """Equal blocks are planned alike; that all of these plans are beaten doesn't say that the others are."""
    graph, random = blocks(3), Random(5)  # prices for which blocks that are planned apart are faster
    prices = random_prices(graph, Mesh((2,)), random)
    folding = fold(graph, prices.dims)
    space = build_space(graph, prices, folding)
    alike = choose(graph, prices, space, folding, Goal(gap=1e-9))
    every = build_space(graph, prices, unfolded(graph))
    apart = choose(graph, prices, every, unfolded(graph), Goal(gap=1e-9))
    assert folding.count == 3 and apart.seconds < alike.seconds * 0.999
    assert alike.bound <= apart.seconds * (1 + CLOSE)
    between = (alike.seconds + apart.seconds) / 2
    found = choose(graph, prices, space, folding, Goal(gap=1e-9, cutoff=between))
    assert found.seconds == pytest.approx(alike.seconds, rel=CLOSE)
    with pytest.raises(CutoffError):
        choose(graph, prices, space, folding, Goal(gap=1e-9, cutoff=alike.bound * (1 - CLOSE)))


def test_no_plan_is_sought_that_cannot_beat_a_known_one() -> None:
    graph, random = chain(), Random(0)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=3, layouts=2)
    best = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    again = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9, cutoff=best.seconds * (1 + CLOSE)))
    assert again.seconds == pytest.approx(best.seconds, rel=CLOSE)
    for cutoff in (best.bound * (1 - CLOSE), best.bound / 2):
        with pytest.raises(CutoffError, match=f"wanted less than {cutoff:.4g} s"):
            choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9, cutoff=cutoff))


def test_deep_programs_get_fewer_rounds_and_brief_searches_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is found under a cap all the same, with a bound as true; a brief search may find none."""
    graph = scores()
    prices = random_prices(graph, Mesh((2,)), Random(0))
    space = build_space(graph, prices, unfolded(graph))
    cap = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9)).peak.nbytes - 1
    solved: list[object] = []
    monkeypatch.setattr(search._PlacementSearch, "eliminated", lambda *_: None)
    monkeypatch.setattr(search, "least", lambda *given, **how: solved.append(given) or least(*given, **how))
    monkeypatch.setattr(search, "solve", lambda *given, **how: solved.append(given) or solve(*given, **how))

    def solves(rounds: int, *, brief: bool) -> tuple[int, Solution | None]:
        solved.clear()
        monkeypatch.setattr(search, "FITTING_EFFORT", rounds)
        found = None
        with contextlib.suppress(InfeasibleError):
            found = choose(
                graph,
                prices,
                space,
                unfolded(graph),
                Goal(cap=cap, gap=1e-9),
                Effort(brief=brief),
            )
        return len(solved), found

    many, best = solves(search.MOST_ROUNDS * len(graph.operators), brief=True)  # it isn't deep
    few, deep = solves(1, brief=False)
    fewest, quick = solves(1, brief=True)
    assert many > few > fewest
    assert best and deep and deep.peak.nbytes <= cap and deep.bound == pytest.approx(best.bound)
    assert all(each is None or best.seconds <= each.seconds * (1 + CLOSE) for each in (deep, quick))


@pytest.mark.parametrize(("made", "seed", "is_close"), [(scores, 3, False), (chain, 2, True)])
def test_where_memory_has_a_price_what_the_relaxation_chose_will_do_if_it_is_close(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], Graph], seed: int, is_close: bool
) -> None:
    """Else the whole program is branched; either way the answer is that of about the least cost."""
    graph = made()
    prices = random_prices(graph, Mesh((2,)), Random(seed))
    space = build_space(graph, prices, unfolded(graph))
    free = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    price = (2.0 if is_close else 0.5) * free.seconds / free.peak.nbytes
    sizes: list[int] = []

    def noted(program: LinearProgram, **how: Any) -> SolverAnswer:
        if not how.get("relaxed"):
            sizes.append(sum(upper > 0.0 for upper in program.uppers))
        return solve(program, **how)

    monkeypatch.setattr(search, "solve", noted)
    monkeypatch.setattr(search._PlacementSearch, "eliminated", lambda *_: None)
    goal = Goal(gap=1e-4, bounded=False, memory_price=MemoryPrice(price, price))
    found = choose(graph, prices, space, unfolded(graph), goal)
    assert len(sizes) == (1 if is_close else 2) and sizes == sorted(sizes)
    monkeypatch.setattr(search._PlacementSearch, "near", lambda *_: None)
    best = choose(graph, prices, space, unfolded(graph), goal)
    assert len(set(sizes)) == 2
    least, mine = (each.seconds + price * each.peak.nbytes for each in (best, found))
    assert mine <= least * (1 + 2 * search.PRICED_GAP)
