"""A network has the table's moves and the prices of single moves; without names it loses none of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec, Link
from autopar.convert.moves import effect, gathers, moves
from autopar.convert.network import Alike, Network, paths, priced, unnamed
from autopar.convert.path import interesting
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.placement import B, Layout, P, R, Shard
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from tests.proof.models import Script
from tests.solve.brute_force import DEVICE

TENSORS = ("x", "weight")
ENDS = {3: [(Shard(0), Shard(1), R), (R, Shard(0), Shard(0))], 2: [(Shard(0), Shard(1)), (R, Shard(0))]}


def prices_of(mesh: Mesh) -> tuple[Prices, dict[str, str]]:
    script = Script()
    x = script.user(7, 6, grad=True)
    graph: Graph = script.graph(script.linear(x, 5))
    names = {"x": x, "weight": next(item.name for item in graph.inputs if item.name != x)}
    cluster = ClusterSpec(
        nodes=mesh.shape[0],
        devices_per_node=mesh.num_devices // mesh.shape[0],
        intra=Link(1e-6, 1e9),
        inter=Link(1e-5, 1e8),
    )
    model = CostModel(DEVICE, {}, CollectiveTable({}))
    return Prices(graph, Dims(graph, find_atoms(graph), mesh), cluster, model), names


def legal_moves(prices: Prices, name: str, ends: list[Layout]) -> list[tuple[Layout, Layout, float]]:
    """All moves between legal layouts, one by one."""
    placements = interesting(ends, differentiable=True)
    good = [layout for layout in itertools.product(*placements) if prices.dims.legal(name, layout)]
    price = prices.gradient_sync if name in prices._parameters else prices.move
    return [
        (move.source, move.target, price(name, move))
        for layout in good
        for move in moves(layout, placements)
        if prices.dims.legal(name, move.target)
    ]


@pytest.mark.parametrize("mesh", [Mesh((2, 3)), Mesh((2, 2, 2))], ids=str)
@pytest.mark.parametrize("tensor", TENSORS)
def test_a_network_has_every_legal_move_at_its_price(mesh: Mesh, tensor: str) -> None:
    prices, names = prices_of(mesh)
    name, ends = names[tensor], ENDS[len(mesh.shape)]
    found = prices.network(name, interesting(ends, differentiable=True))
    ours = {found.move(number): seconds for number, seconds in enumerate(found.seconds)}
    theirs = {(source, target): seconds for source, target, seconds in legal_moves(prices, name, ends)}
    assert {(move.source, move.target): seconds for move, seconds in ours.items()} == pytest.approx(theirs)
    for number, move in enumerate(ours):
        assert found.forward[number] == pytest.approx(prices.move_parts(name, move)[0])
        assert found.into_shard[number] == isinstance(move.placements[1], Shard)
        assert found.from_partial[number] == (move.placements[0] == P)
        assert found.sums[number] == (effect(move).name == "r_to_b")
        assert found.gathers[number] == gathers(move)


@given(st.sets(st.sampled_from([*itertools.product((R, P, B, Shard(0), Shard(1)), repeat=2)])))
def test_a_network_leads_over_legal_layouts_alone_and_misses_none(good: set[Layout]) -> None:
    placements = ((R, P, B, Shard(0), Shard(1)),) * 2
    unpriced = paths(placements, (), tuple(item in good for item in itertools.product(*placements)))
    found = priced(unpriced, np.ones(len(unpriced.source)), np.zeros(len(unpriced.source)))
    ways = [found.move(number) for number in range(len(found.source))]
    legal_ways = {move for layout in good for move in moves(layout, placements) if move.target in good}
    assert set(found.layouts) == good
    assert len(ways) == len(legal_ways)
    assert set(ways) == legal_ways


@given(st.integers(0, 999), st.floats(0, 1), st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True))
def test_ways_to_a_need_have_allowed_moves_alone_and_all_of_them(
    seed: int, share: float, ends: list[int]
) -> None:
    prices, names = prices_of(Mesh((2,)))
    found = prices.network(names["x"], ((R, P, B, Shard(0), Shard(1)),))
    source, need = (found.layouts[end] for end in ends)
    allowed = np.random.default_rng(seed).random(len(found.source)) < share
    ways = [found.move(number) for number in range(len(found.source))]
    graph: nx.DiGraph[Layout] = nx.DiGraph()
    graph.add_nodes_from(found.layouts)
    graph.add_edges_from((ways[number].source, ways[number].target) for number in np.flatnonzero(allowed))
    ahead = {source} | nx.descendants(graph, source)
    behind = {need} | nx.ancestors(graph, need)
    follows = [good and way.source in ahead for way, good in zip(ways, allowed, strict=True)]
    leads = [good and way.target in behind for way, good in zip(ways, follows, strict=True)]
    assert found.following(found.flags([source]), allowed).tolist() == follows
    assert found.between(found.flags([source]), found.flags([need]), allowed).tolist() == leads


@pytest.mark.parametrize("alike", [((1, 2),), ((0, 1, 2),)], ids=str)
@pytest.mark.parametrize("tensor", TENSORS)
def test_without_names_no_move_is_lost_or_dearer(alike: Alike, tensor: str) -> None:
    prices, names = prices_of(Mesh((2, 2, 2)))
    if len(alike[0]) == 3:
        prices = replace(prices, cluster=ClusterSpec(devices_per_node=8, intra=Link(1e-6, 1e9)))
    name, ends = names[tensor], ENDS[3]
    columns = interesting(ends, differentiable=True)
    shared = tuple(sorted({item for column in columns for item in column}, key=str))
    placements = tuple(shared if any(axis in axes for axes in alike) else columns[axis] for axis in range(3))
    found = prices.network(name, placements, alike=alike)
    ways = {
        (found.layouts[source], found.layouts[target]): seconds
        for source, target, seconds in zip(found.source, found.target, found.seconds, strict=True)
    }
    for source, target, seconds in legal_moves(prices, name, ends):
        assert ways[unnamed(source, alike), unnamed(target, alike)] <= seconds * (1 + 1e-9)


def test_a_move_that_no_naming_allows_is_not_there() -> None:
    """Rows that minor axes share out too can't be gathered over the major one first."""
    prices, names = prices_of(Mesh((2, 2, 2)))
    columns = tuple(((R, Shard(0)),) * 3)
    found = prices.network(names["x"], columns, alike=((1, 2),))
    ways = {(found.layouts[a], found.layouts[b]) for a, b in zip(found.source, found.target, strict=True)}
    split = Shard(0)
    assert ((split, R, R), (R, R, R)) in ways
    assert ((split, split, R), (split, R, R)) in ways
    assert ((split, split, R), (R, split, R)) not in ways


def test_tensors_that_are_cut_alike_share_their_moves() -> None:
    """The moves are found once, whatever a tensor's size; its seconds are its own."""
    placements = ((R, P, B, Shard(0)), (R, P, B, Shard(1)))

    def of(seconds: float) -> Network:
        unpriced = paths(placements, (), (True,) * math.prod(map(len, placements)))
        return priced(unpriced, np.full(len(unpriced.source), seconds), np.zeros(len(unpriced.source)))

    one, other = of(1.0), of(2.0)
    assert one.source is other.source and one.place is other.place
    assert set(one.seconds) == {1.0} and set(other.seconds) == {2.0}
