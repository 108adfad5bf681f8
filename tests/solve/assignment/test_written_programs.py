"""A program that is given other costs is the one that would be written for them, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.assignment.symmetry import axes_alike, forget
from autopar.solve.assignment.written_programs import WrittenPrograms
from autopar.solve.choices.fold import fold
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.choices.space import build_space
from autopar.solve.program.problem import Problem
from tests.solve.assignment.test_symmetry import GPU, ONE_NODE
from tests.solve.brute_force import branches, chain

UNDER = {"shown": 0.5, "credit": 0.25}
HOW: dict[str, dict[str, Any]] = {
    "free": {"cap": None},
    "capped": {"cap": 4000, "recomputes": True},
    "relaxed": {"cap": None, "relaxed": True},
}


def prices_of(graph: Graph, **more: Any) -> Prices:
    dims = Dims(graph, find_atoms(graph), Mesh((2, 2, 2)))
    return Prices(graph, dims, ONE_NODE, CostModel(GPU, {}, CollectiveTable({})), **more)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("named", [True, False], ids=["named", "nameless"])
@pytest.mark.parametrize("weight", [1.0, 0.25], ids=["whole batch", "micro-batches"])
@pytest.mark.parametrize("make", [chain, branches], ids=lambda make: make.__name__)
def test_other_costs_make_the_program_that_would_be_written_for_them(
    make: Callable[[], Graph], weight: float, named: bool, how: str
) -> None:
    graph = make()
    prices = prices_of(graph, step_weight=weight)
    folding, alike = fold(graph, prices.dims), () if named else axes_alike(prices)
    space = build_space(graph, prices, folding)
    space = forget(space, alike) if alike else space
    options, programs = {**HOW[how], "alike": alike}, WrittenPrograms()
    first = programs.problem(graph, prices, space, folding, **options)
    before = list(first.lp.costs)
    other = prices.under(**UNDER)
    found = programs.problem(graph, other, space, folding, **options)
    wanted = Problem(graph, prices_of(graph, step_weight=weight, **UNDER), space, folding, **options)
    assert found.lp.rows is first.lp.rows  # it isn't written again
    assert first.lp.costs == before != found.lp.costs
    assert found.lp.costs == pytest.approx(wanted.lp.costs, rel=1e-12)
    assert found.prices is other and found.operators.prices is other
    for ours, theirs in zip(found.tensors, wanted.tensors, strict=True):
        assert ours.network.seconds == pytest.approx(theirs.network.seconds, rel=1e-12)
    mine, fresh = found.lp.matrix(), wanted.lp.matrix()
    assert np.array_equal(mine.variables, fresh.variables)
    assert np.array_equal(mine.coefficients, fresh.coefficients)


def test_what_differs_by_more_than_costs_is_written_by_itself() -> None:
    graph = chain()
    prices = prices_of(graph)
    folding = fold(graph, prices.dims)
    space, programs = build_space(graph, prices, folding), WrittenPrograms()
    first = programs.problem(graph, prices, space, folding, cap=None)
    other = prices.under(**UNDER)
    fewer = replace(space, strategies={name: each[:2] for name, each in space.strategies.items()})
    for differs in (
        programs.problem(graph, other, space, folding, cap=4000),
        programs.problem(graph, other, fewer, folding, cap=None),
        programs.problem(graph, other, space, folding, cap=None, memory_price=MemoryPrice(1e-9, 1e-9)),
    ):
        assert differs.lp.rows is not first.lp.rows
