"""Where bytes have a price no placement is below the frontier, and its corners are on it."""

from __future__ import annotations

from random import Random

import pytest
import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.graph import Ref
from autopar.core.mesh import Mesh
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.memory_frontier import MemoryPricedProgram
from autopar.solve.assignment.search import choose
from autopar.solve.assignment.symmetry import axes_alike
from autopar.solve.choices.fold import fold
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.choices.space import build_space
from tests.proof.models import Script
from tests.solve.brute_force import DEVICE, BruteForce, blocks, chain, random_prices, small_space, unfolded

aten = torch.ops.aten
CLOSE = 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_no_placement_is_below(seed: int) -> None:
    graph, random = chain(), Random(seed)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=4, layouts=2)
    plans = [
        (seconds, PricedProgram(prices, program).peak)
        for seconds, program in BruteForce(graph, prices, space).programs()
    ]
    priced = MemoryPricedProgram(graph, prices, space, unfolded(graph), relaxed=True)
    fastest = min(seconds for seconds, _ in plans)
    assert priced.least(FREE) == pytest.approx(fastest, rel=CLOSE)
    unit = fastest / max(peak.nbytes for _, peak in plans)
    before = 0.0
    for price in (0.1 * unit, unit, 3 * unit, 10 * unit):
        for flight in (1.0, 4.0):
            memory_price = MemoryPrice(price, price * flight)
            best = min(
                each + memory_price.state * peak.state + memory_price.saved * peak.saved
                for each, peak in plans
            )
            assert priced.least(memory_price) <= best * (1 + CLOSE)
        assert priced.least(MemoryPrice(price, price)) > before
        before = priced.least(MemoryPrice(price, price))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_names_of_alike_axes_are_forgotten_where_no_plan_is_sought(requires_grad: bool) -> None:
    """With the names of three alike axes, and without them, the bound is that of the fastest placement."""
    s = Script()
    product = s.call(aten.mul.Tensor, Ref(s.user(4, 6, grad=requires_grad)), Ref(s.user(4, 6)))
    graph = s.graph(s.call(aten.sum.default, Ref(product)))
    cluster = ClusterSpec(devices_per_node=8, intra=Link(1e-6, 1e8))
    dims = Dims(graph, find_atoms(graph), Mesh((2, 2, 2)))
    prices = Prices(graph, dims, cluster, CostModel(DEVICE, {}, CollectiveTable({})))
    assert axes_alike(prices) == ((0, 1, 2),)
    folding = unfolded(graph)
    space = build_space(graph, prices, folding)
    named, nameless = (
        MemoryPricedProgram(graph, prices, space, folding, relaxed=relaxed) for relaxed in (False, True)
    )
    assert nameless.problem.alike == ((0, 1, 2),) and not named.problem.alike
    assert len(nameless.problem.lp.costs) < len(named.problem.lp.costs)
    best = choose(graph, prices, space, folding, Goal(gap=1e-9)).seconds
    assert nameless.least(FREE) <= best * (1 + CLOSE)
    assert nameless.least(FREE) >= best / 2


def test_corners_are_placements_each_slower_and_leaner_than_the_one_before() -> None:
    graph, random = blocks(4), Random(1)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=4, layouts=2)
    priced = MemoryPricedProgram(graph, prices, space, fold(graph, prices.dims))
    found = list(priced.corners(4.0, 1e9))
    assert len(found) > 1
    seconds = [PricedProgram(prices, program).seconds for program in found]
    peaks = [PricedProgram(prices, program).peak for program in found]
    nbytes = [peak.state + 4.0 * peak.saved for peak in peaks]
    assert seconds == sorted(seconds) and nbytes == sorted(nbytes, reverse=True)
    assert seconds[0] == pytest.approx(priced.least(FREE), rel=CLOSE)
    fewer = MemoryPricedProgram(graph, prices, space, fold(graph, prices.dims)).corners(4.0, seconds[-1])
    assert [PricedProgram(prices, program).seconds for program in fewer] == pytest.approx(seconds[:-1])
