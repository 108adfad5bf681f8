"""The solver's optimum is the best of all plans, and what it says about it is true."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.ilp.choose import choose
from tests.ilp.brute_force import GRAPHS, BruteForce, random_prices, small_space, unfolded

CLOSE = 1e-6  # relative


@pytest.mark.parametrize("mesh", [Mesh((3,)), Mesh((2, 2))], ids=str)
@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_the_best_of_all_plans(make: Callable[[], Graph], mesh: Mesh, seed: int) -> None:
    graph, random = make(), Random(seed)
    prices = random_prices(graph, mesh, random)
    space = small_space(graph, prices, random, most=5, layouts=3)
    best = BruteForce(graph, prices, space).best()
    found = choose(graph, prices, space, unfolded(graph), gap=1e-9)
    assert found.bound <= best * (1 + CLOSE)
    assert found.seconds == pytest.approx(best, rel=CLOSE)
    assert found.status == "optimal"
