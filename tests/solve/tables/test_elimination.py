"""Choices that are eliminated are those of the cheapest plan, found by trying all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.search import choose
from autopar.solve.assignment.symmetry import choose_named
from autopar.solve.assignment.written_programs import WrittenPrograms
from autopar.solve.choices.space import build_space
from autopar.solve.tables import choice_tables, elimination
from autopar.solve.tables.choice_tables import ChoiceTables, CostTable, WideError
from autopar.solve.tables.elimination import cheapest_program, least
from tests.solve.assignment.test_symmetry import GPU, ONE_NODE
from tests.solve.assignment.test_written_programs import UNDER
from tests.solve.brute_force import BruteForce, branches, chain, random_prices, small_space, unfolded


@pytest.fixture(autouse=True)
def large_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as large as these small graphs have them."""
    monkeypatch.setattr(choice_tables, "MOST_SUMS", 1 << 24)


def prices_of(graph: Graph, **more: Any) -> Prices:
    dims = Dims(graph, find_atoms(graph), Mesh((2, 4)))
    return Prices(graph, dims, ONE_NODE, CostModel(GPU, {}, CollectiveTable({})), **more)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9999), st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(0, 6))
def test_the_least_sum_of_tables_is_found_with_the_alternatives_that_give_it(
    seed: int, sizes: list[int], count: int
) -> None:
    random = np.random.default_rng(seed)
    tables = []
    for _ in range(count):
        own = tuple(random.permutation(len(sizes))[: random.integers(1, len(sizes) + 1)].tolist())
        costs = random.integers(0, 9, [sizes[choice] for choice in own]).astype(np.float64)
        tables.append(CostTable(own, np.where(costs == 8, math.inf, costs)))

    def cost(taken: tuple[int, ...]) -> float:
        return sum(float(each.costs[tuple(taken[choice] for choice in each.choices)]) for each in tables)

    found, taken = least(tables, sizes)
    assert found == min(map(cost, itertools.product(*map(range, sizes))))
    assert cost(tuple(taken)) == found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [chain, branches], ids=lambda make: make.__name__)
def test_the_cheapest_program_is_that_of_all(make: Callable[[], Graph], seed: int) -> None:
    graph, random = make(), Random(seed)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=3, layouts=2, local=bool(seed % 2))
    program, cost = cheapest_program(ChoiceTables(graph, prices, space, unfolded(graph)))
    assert cost == pytest.approx(BruteForce(graph, prices, space).best(), rel=1e-9)
    assert PricedProgram(prices, program).seconds == pytest.approx(cost, rel=1e-9)


@pytest.mark.parametrize("make", [chain, branches], ids=lambda make: make.__name__)
def test_the_cheapest_program_costs_what_the_integer_program_finds(make: Callable[[], Graph]) -> None:
    graph = make()
    prices = prices_of(graph)
    space, folding = build_space(graph, prices, unfolded(graph)), unfolded(graph)
    program, cost = cheapest_program(ChoiceTables(graph, prices, space, folding))
    assert cost == pytest.approx(choose(graph, prices, space, folding, Goal(gap=1e-9)).seconds, rel=1e-6)
    assert PricedProgram(prices, program).seconds <= cost * (1 + 1e-9)


@pytest.mark.parametrize("make", [chain, branches], ids=lambda make: make.__name__)
def test_other_costs_change_tables_alone(make: Callable[[], Graph]) -> None:
    graph = make()
    prices = prices_of(graph)
    space, folding, programs = build_space(graph, prices, unfolded(graph)), unfolded(graph), WrittenPrograms()
    first = programs.tables(graph, prices, space, folding)
    _, before = cheapest_program(first)
    found = programs.tables(graph, prices.under(**UNDER), space, folding)
    assert found.joints is first.joints  # it isn't written again
    wanted = ChoiceTables(graph, prices_of(graph, **UNDER), space, folding)
    assert cheapest_program(found)[1] == pytest.approx(cheapest_program(wanted)[1], rel=1e-12)
    assert cheapest_program(first)[1] == before != cheapest_program(found)[1]


def test_wide_graphs_are_left_to_the_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = branches()
    prices, folding = prices_of(graph), unfolded(graph)
    space = build_space(graph, prices, folding)
    goal = Goal(gap=1e-9)
    monkeypatch.setattr("autopar.solve.assignment.symmetry.LEAST_ELIMINATED_OPERATORS", 0)
    exact = choose_named(graph, prices, space, folding, goal)
    assert exact.status == "optimal" and exact.gap == pytest.approx(0, abs=1e-9)
    for module, limit in (
        (choice_tables, "MOST_USES"),
        (choice_tables, "MOST_SUMS"),
        (elimination, "MOST_ENTRIES"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 1)
            with pytest.raises(WideError):
                cheapest_program(ChoiceTables(graph, prices, space, folding))
            other = choose_named(graph, prices, space, folding, goal)
            assert other.seconds >= exact.seconds * (1 - 1e-9)
            assert other.bound <= exact.seconds * (1 + 1e-6)


def test_weights_that_are_gathered_once_a_step_are_left_to_the_integer_program() -> None:
    graph = chain()
    prices = prices_of(graph, step_weight=0.25)
    space = build_space(graph, prices, unfolded(graph))
    with pytest.raises(WideError):
        ChoiceTables(graph, prices, space, unfolded(graph))
