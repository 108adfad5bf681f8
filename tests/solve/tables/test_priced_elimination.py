"""Where bytes have a price the cheapest program is found by elimination, and the one of fewest bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.recompute import Recompute
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.assignment import least_memory, symmetry
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.least_memory import least as least_bytes
from autopar.solve.assignment.search import choose
from autopar.solve.assignment.symmetry import choose_named
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.choices.space import build_space
from autopar.solve.highs import solve
from autopar.solve.program.problem import Problem
from autopar.solve.program.solution import Solution
from autopar.solve.tables.elimination import least
from autopar.solve.tables.memory_tables import MemoryTables
from autopar.solve.tables.priced_elimination import eliminated_at
from tests.solve.assignment.test_symmetry import GPU, ONE_NODE
from tests.solve.brute_force import chain, unfolded
from tests.solve.tables.test_capped_elimination import deep
from tests.solve.tables.test_elimination import large_tables

__all__ = ["large_tables"]
PRICES = [FREE, MemoryPrice(1e-12, 1e-12), MemoryPrice(1e-9, 3e-9), MemoryPrice(1e-6)]
NOTHING = {"recompute": Recompute.NONE, "offload": Offload.NONE}


def prices_of(graph: Graph, **more: Any) -> Prices:
    dims = Dims(graph, find_atoms(graph), Mesh((8,)))
    return Prices(graph, dims, ONE_NODE, CostModel(GPU, {}, CollectiveTable({})), **more)


def tables_of(graph: Graph, prices: Prices) -> MemoryTables:
    folding = unfolded(graph)
    return MemoryTables(graph, prices, build_space(graph, prices, folding), folding, offloads=False)


@pytest.mark.parametrize("step_weight", [1.0, 0.25])
@pytest.mark.parametrize(
    "price", [FREE, MemoryPrice(1e-12, 1e-12), MemoryPrice(1e-9, 3e-9), MemoryPrice(1e-6)]
)
@pytest.mark.parametrize("make", [chain, deep], ids=lambda make: make.__name__)
def test_no_program_is_cheaper_by_seconds_and_bytes(
    make: Callable[[], Graph], price: MemoryPrice, step_weight: float
) -> None:
    """Nor where weights may be gathered once for all micro-batches."""
    graph = make()
    prices = prices_of(graph, step_weight=step_weight, accumulates=step_weight < 1.0)
    folding, tables = unfolded(graph), tables_of(graph, prices)
    costs = tables.costs_at(price)
    cost, taken = least(tables.tables_at(costs, price, recomputes=False), list(map(len, tables.choices)))
    program = Problem(graph, prices, tables.space, folding, cap=None, memory_price=price)
    assert cost == pytest.approx(solve(program.lp, relaxed=True).cost, rel=1e-6)
    chosen = tables.chosen(taken, costs, price)
    found = eliminated_at(tables, price, **NOTHING)
    assert found.seconds <= tables.totals(chosen).seconds * (1 + 1e-9)
    assert price != FREE or found.bound == pytest.approx(found.seconds)


def test_long_graphs_are_solved_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, price = deep(), MemoryPrice(1e-11, 1e-11)
    prices, folding = prices_of(graph), unfolded(graph)
    space = build_space(graph, prices, folding)
    whole = choose(graph, prices, space, folding, Goal(gap=1e-9, memory_price=price))
    monkeypatch.setattr(symmetry, "LEAST_ELIMINATED_OPERATORS", 0)
    monkeypatch.setattr(symmetry, "choose", None)
    found = choose_named(
        graph,
        prices,
        space,
        folding,
        Goal(gap=1e-9, memory_price=price),
    )
    assert found.bound < 0

    def cost(solution: Solution) -> float:
        peak = solution.peak
        return solution.seconds + price.state * peak.state + price.saved * peak.saved

    assert cost(found) <= cost(whole) * (1 + 1e-6)


@pytest.mark.parametrize("step_weight", [1.0, 0.25])
def test_the_fewest_bytes_are_those_that_the_integer_program_finds(
    monkeypatch: pytest.MonkeyPatch, step_weight: float
) -> None:
    graph = deep()
    prices = prices_of(graph, step_weight=step_weight, accumulates=step_weight < 1.0)
    folding = unfolded(graph)
    space = build_space(graph, prices, folding)
    found, work = least_bytes(graph, prices, space, folding)
    monkeypatch.setattr(least_memory, "MemoryTables", _wide)
    other, _ = least_bytes(graph, prices, space, folding)
    assert work == 0.0 and found is not None and other is not None
    assert found.peak.nbytes <= other.peak.nbytes


def _wide(*_: object, **__: object) -> None:
    raise least_memory.WideError
