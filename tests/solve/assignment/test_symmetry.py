"""Plans found by way of forgotten names are plans, and their bound holds for all plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.assignment import symmetry
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.search import choose
from autopar.solve.assignment.symmetry import WHOLE_PROGRAM_GAP, axes_alike, choose_named, forget, unlike
from autopar.solve.choices.fold import fold
from autopar.solve.choices.space import build_space
from tests.proof.models import Script
from tests.solve.brute_force import DEVICE, branches, chain, unfolded

aten = torch.ops.aten
ONE_NODE = ClusterSpec(devices_per_node=8, intra=Link(1e-6, 1e8))
GPU = replace(DEVICE, kind="cuda")  # whose copies beside a collective cost nothing
TWO_NODES = ClusterSpec(nodes=2, devices_per_node=4, intra=Link(1e-6, 1e8), inter=Link(1e-5, 1e7))


@pytest.mark.parametrize(
    "cluster",
    [ONE_NODE, pytest.param(TWO_NODES, marks=pytest.mark.slow)],
    ids=["one node", "two nodes"],
)
@pytest.mark.parametrize("make", [chain, branches], ids=lambda make: make.__name__)
def test_the_bound_without_names_holds_and_the_plan_is_nearly_the_best(
    make: Callable[[], Graph], cluster: ClusterSpec
) -> None:
    graph = make()
    dims = Dims(graph, find_atoms(graph), Mesh((2, 2, 2)))
    prices = Prices(graph, dims, cluster, CostModel(GPU, {}, CollectiveTable({})))
    assert axes_alike(prices) == (((0, 1, 2),) if cluster is ONE_NODE else ((1, 2),))
    space, folding = build_space(graph, prices, unfolded(graph)), unfolded(graph)
    best = choose(graph, prices, space, folding, Goal(gap=1e-9))
    found = choose_named(graph, prices, space, folding, Goal(gap=1e-9))
    assert found.bound <= best.seconds * (1 + 1e-6)
    assert best.bound * (1 - 1e-6) <= found.seconds <= best.seconds / (1 - WHOLE_PROGRAM_GAP)


def test_few_strategies_keep_their_names_where_no_bound_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain()
    dims = Dims(graph, find_atoms(graph), Mesh((2, 2, 2)))
    prices = Prices(graph, dims, ONE_NODE, CostModel(GPU, {}, CollectiveTable({})))
    folding = unfolded(graph)
    space = build_space(graph, prices, folding)
    few = replace(space, strategies={name: each[:4] for name, each in space.strategies.items()})
    calls = []
    monkeypatch.setattr(symmetry, "forget", lambda *args: calls.append(args) or forget(*args))
    for bounded in (False, True):
        found = choose_named(graph, prices, few, folding, Goal(gap=1e-9, bounded=bounded))
        assert len(calls) == bounded
        assert found.seconds == pytest.approx(choose(graph, prices, few, folding, Goal(gap=1e-9)).seconds)


def partly_equal() -> Graph:
    """Three equal blocks before layers of other widths."""
    s = Script()
    x = s.linear(s.user(4, 6), 8)
    for _ in range(3):
        x = s.linear(s.call(aten.gelu.default, Ref(s.linear(x, 16))), 8)
    for width in (10, 12, 20):
        x = s.linear(x, width)
    return s.graph(s.call(aten.sum.default, Ref(x)))


def test_where_many_are_unlike_those_that_are_equal_are_chosen_by_themselves_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So there is nothing between the plan and its bound, and it is no slower."""
    graph = partly_equal()
    dims = Dims(graph, find_atoms(graph), Mesh((2, 4)))
    prices = Prices(graph, dims, ONE_NODE, CostModel(GPU, {}, CollectiveTable({})))
    folding = fold(graph, dims)
    space = build_space(graph, prices, folding)
    assert folding.count > 1 and unlike(graph, space, folding) is None
    ask = partial(choose_named, graph, prices, space, folding, Goal(gap=1e-9))
    folded = ask()
    monkeypatch.setattr(symmetry, "MANY_OPERATOR_CLASSES", len(space.strategies) + 1)
    assert unlike(graph, space, folding) is None
    monkeypatch.setattr(symmetry, "MANY_OPERATOR_CLASSES", len(space.strategies))
    apart = unlike(graph, space, folding)
    assert apart is not None
    assert apart[0].strategies.keys() == {item.name for item in graph.operators}
    found = ask()
    assert folded.bound * (1 - 1e-6) <= found.bound == pytest.approx(found.seconds)
    assert found.seconds <= folded.seconds * (1 + 1e-9)
