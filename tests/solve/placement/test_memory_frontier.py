"""Where bytes have a price no placement is below the frontier, and its corners are on it."""

from __future__ import annotations

from random import Random

import pytest

from autopar.core.mesh import Mesh
from autopar.cost.program.peak_memory import peak_memory
from autopar.solve.placement.fold import fold
from autopar.solve.placement.memory_frontier import Priced
from autopar.solve.placement.problem import FREE, Dear
from autopar.solve.placement.search import total_seconds
from tests.solve.brute_force import BruteForce, blocks, chain, random_prices, small_space, unfolded

CLOSE = 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_no_placement_is_below(seed: int) -> None:
    graph, random = chain(), Random(seed)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=4, layouts=2)
    plans = [
        (seconds, peak_memory(graph, prices, program))
        for seconds, program in BruteForce(graph, prices, space).programs()
    ]
    priced = Priced(graph, prices, space, unfolded(graph), relaxed=True)
    fastest = min(seconds for seconds, _ in plans)
    assert priced.least(FREE) == pytest.approx(fastest, rel=CLOSE)
    unit = fastest / max(peak.nbytes for _, peak in plans)
    before = 0.0
    for price in (0.1 * unit, unit, 3 * unit, 10 * unit):
        for flight in (1.0, 4.0):
            dear = Dear(price, price * flight)
            best = min(each + dear.state * peak.state + dear.kept * peak.kept for each, peak in plans)
            assert priced.least(dear) <= best * (1 + CLOSE)
        assert priced.least(Dear(price, price)) > before
        before = priced.least(Dear(price, price))


def test_corners_are_placements_each_slower_and_leaner_than_the_one_before() -> None:
    graph, random = blocks(4), Random(1)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=4, layouts=2)
    priced = Priced(graph, prices, space, fold(graph, prices.dims))
    found = list(priced.corners(4.0, 1e9))
    assert len(found) > 1
    seconds = [total_seconds(graph, prices, program) for program in found]
    peaks = [peak_memory(graph, prices, program) for program in found]
    nbytes = [peak.state + 4.0 * peak.kept for peak in peaks]
    assert seconds == sorted(seconds) and nbytes == sorted(nbytes, reverse=True)
    assert seconds[0] == pytest.approx(priced.least(FREE), rel=CLOSE)
    fewer = Priced(graph, prices, space, fold(graph, prices.dims)).corners(4.0, seconds[-1])
    assert [total_seconds(graph, prices, program) for program in fewer] == pytest.approx(seconds[:-1])
