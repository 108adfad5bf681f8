"""Where memory has a price, an answer costs its seconds and the price of all that it holds."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.cost.operators.prices import Prices
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.choices.space import build_space
from autopar.solve.highs import solve
from autopar.solve.program.problem import Problem
from tests.proof.models import Script
from tests.solve.brute_force import random_prices, unfolded

aten = torch.ops.aten
PRICE = 1e-6  # seconds of a byte
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "relaxed": {"relaxed": True},
    "recomputed": {"recomputes": True},
}


def dropped() -> Graph:
    """Two layers whose dropouts keep masks of their own beside what they take and give."""
    s = Script()
    x = s.user(8, 6)
    for _ in range(2):
        x = s.call(aten.dropout.default, Ref(s.linear(x, 6)), 0.5, True)
    return s.graph(s.call(aten.sum.default, Ref(x)))


def written(graph: Graph, prices: Prices, memory_price: MemoryPrice, **how: Any) -> Problem:
    space = build_space(graph, prices, unfolded(graph))
    return Problem(graph, prices, space, unfolded(graph), cap=None, memory_price=memory_price, **how)


@pytest.mark.parametrize("way", WAYS)
def test_costs_rise_by_the_price_of_all_that_variables_hold(way: str) -> None:
    """Operators' own masks count among it, also after the program is given other costs."""
    graph = dropped()
    prices = random_prices(graph, Mesh((2,)), Random(1))
    problem = written(graph, prices, MemoryPrice(PRICE, PRICE), **WAYS[way])
    twice = written(graph, prices, MemoryPrice(2 * PRICE, 2 * PRICE), **WAYS[way])
    held = np.zeros(len(problem.lp.costs))
    for nbytes, variable in problem.memory.held:
        held[variable] += nbytes
    assert held[problem.operators.variables].any()
    rise = np.array(twice.lp.costs) - np.array(problem.lp.costs)
    assert rise == pytest.approx(PRICE * held, rel=1e-9, abs=1e-15)
    credit = {"credit": 0.25}
    given, wanted = problem.under(prices.under(**credit)), prices.under(**credit)
    anew = written(graph, wanted, MemoryPrice(PRICE, PRICE), **WAYS[way])
    assert given.lp.costs == pytest.approx(anew.lp.costs, rel=1e-12)


def test_what_is_recomputed_costs_its_seconds_beside_the_price_of_what_it_spares() -> None:
    graph = dropped()
    prices = random_prices(graph, Mesh((2,)), Random(1))
    problem = written(graph, prices, MemoryPrice(PRICE, PRICE), recomputes=True)
    answer = solve(problem.lp)
    assert answer.values is not None
    seconds = sum(
        prices.operator(problem.operators.by_name[name], strategy).recompute * answer.values[r]
        for name, variables in problem.operators.r.items()
        for strategy, r in zip(problem.space.strategies[name], variables, strict=True)
    )
    assert problem.operators.recompute_cost(answer.values) == pytest.approx(seconds) != 0.0
