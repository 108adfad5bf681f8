"""Straight ways from layout to layout make a program of the same least cost as single moves do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autopar.core.graph import Graph
from autopar.cost.program.priced_program import PricedProgram
from autopar.solve.assignment.symmetry import axes_alike, forget
from autopar.solve.choices.direct_ways import ways
from autopar.solve.choices.fold import fold
from autopar.solve.choices.space import build_space
from autopar.solve.highs import solve
from autopar.solve.linear_program import SolverAnswer
from autopar.solve.program import tensor_flows as written
from autopar.solve.program.decode import is_whole, read
from autopar.solve.program.problem import Problem
from tests.solve.assignment.test_written_programs import prices_of
from tests.solve.brute_force import branches, chain


def answered(graph: Graph, *, named: bool, cap: int | None) -> tuple[Problem, SolverAnswer]:
    prices = prices_of(graph)
    folding, alike = fold(graph, prices.dims), () if named else axes_alike(prices)
    space = build_space(graph, prices, folding)
    space = forget(space, alike) if alike else space
    found = Problem(graph, prices, space, folding, cap=cap, alike=alike)
    return found, solve(found.lp, relaxed=True)


@pytest.mark.parametrize("cap", [None, 4000], ids=["free", "capped"])
@pytest.mark.parametrize(
    ("make", "named"),
    [(chain, True), (chain, False), (branches, False)],
    ids=["named", "nameless", "branches"],
)
def test_the_least_cost_is_that_over_single_moves(
    make: Callable[[], Graph], named: bool, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make()
    monkeypatch.setattr(written, "FEW_MOVES", 0)
    monkeypatch.setattr(written, "FEWER", 1 << 40)
    flows, by_moves = answered(graph, named=named, cap=cap)
    monkeypatch.setattr(written, "FEWER", 0)
    direct, by_ways = answered(graph, named=named, cap=cap)
    assert not any(tensor.ways for tensor in flows.tensors)
    assert any(tensor.ways for tensor in direct.tensors)
    assert by_ways.bound == pytest.approx(by_moves.bound, rel=1e-9)


def test_what_is_read_costs_what_the_solver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "FEWER", 0)
    found, answer = answered(chain(), named=True, cap=None)
    assert is_whole(found, answer)
    assert PricedProgram(found.prices, read(found, answer)).seconds <= answer.cost * (1 + 1e-9)


def test_a_way_is_the_cheapest_of_allowed_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = answered(chain(), named=True, cap=None)
    network = max((tensor.network for tensor in found.tensors), key=lambda each: len(each.source))
    allowed = np.arange(len(network.source)) % 7 > 0
    everywhere = np.arange(len(network.layouts))
    wanted = _floyd(network, allowed)
    assert np.allclose(ways(network, everywhere, everywhere, allowed), wanted)
    assert math.inf in ways(network, everywhere, everywhere, np.zeros_like(allowed))


def _floyd(network: Any, allowed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    count = len(network.layouts)
    found = np.full((count, count), np.inf)
    np.fill_diagonal(found, 0.0)
    for move in np.flatnonzero(allowed):
        source, target = network.source[move], network.target[move]
        found[source, target] = min(found[source, target], network.seconds[move])
    for middle in range(count):
        found = np.minimum(found, found[:, middle : middle + 1] + found[middle : middle + 1])
    return found
