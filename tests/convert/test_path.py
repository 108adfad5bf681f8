"""Conversions: every path keeps value and gradient, is the cheapest, and keeps shards in one block."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import autopar.runtime.collectives.placement_moves  # noqa: F401  (registers the operators that programs call)
from autopar.convert.moves import legal, moves
from autopar.convert.network import paths, priced
from autopar.convert.path import interesting, tree, tree_within
from autopar.core.graph import Graph, GraphInput, InputKind, TensorSpec
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import B, Layout, P, Placement, R, Shard, show
from autopar.core.program import Program
from autopar.errors import RuleError
from autopar.proof.ranks import run
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.atoms import Atoms, Dims

SHAPE = (5, 7)
PLACEMENTS: tuple[Placement, ...] = (R, P, B, Shard(0), Shard(1))
S = Shard(0)


def one_tensor(mesh: Mesh) -> Dims:
    spec = TensorSpec(SHAPE, torch.float64, requires_grad=True)
    graph = Graph((GraphInput("x", InputKind.USER, "x", spec),), (), ("x",), {"x": spec})
    return Dims(graph, Atoms(graph, [], []), mesh)


def layouts(mesh: Mesh) -> list[Layout]:
    dims = one_tensor(mesh)
    found = itertools.product(PLACEMENTS, repeat=len(mesh.shape))
    return [layout for layout in found if dims.legal("x", layout)]


def shares(full: Tensor, layout: Layout, dims: Dims, *, summed: Placement, seed: int) -> list[Tensor]:
    """Every rank's part; along axes that are `summed`, random shares that add up to the whole."""
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for axis, placement in enumerate(layout):
        drawn = torch.rand((dims.mesh.shape[axis], *SHAPE), generator=generator, dtype=full.dtype)
        weights.append(drawn / drawn.sum(0) if placement == summed else torch.ones_like(drawn))
    found = []
    for rank in range(dims.mesh.num_devices):
        place, mine = dims.mesh.coordinate(rank), full
        for axis, index in enumerate(place):
            mine = mine * weights[axis][index]
        found.append(dims.part("x", layout, place).take(mine).clone())
    return found


def totals(
    locals_: Sequence[Tensor], layout: Layout, dims: Dims, *, same: tuple[Placement, ...]
) -> Iterator[Tensor]:
    """The sum of all ranks' parts, once for each coordinate along the axes that hold the same."""
    groups: dict[tuple[int, ...], Tensor] = {}
    for rank, local in enumerate(locals_):
        place = dims.mesh.coordinate(rank)
        fixed = tuple(index for index, placement in zip(place, layout, strict=True) if placement in same)
        total = groups.setdefault(fixed, torch.zeros(SHAPE, dtype=local.dtype))
        dims.part("x", layout, place).add(local.detach(), total)
    yield from groups.values()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh((3,)), Mesh((2, 2)), Mesh((2, 3))], ids=str)
def test_every_conversion_keeps_the_value_and_transposed_the_gradient(mesh: Mesh) -> None:
    """The pairing <value, gradient> is the same on both sides, typed as the placements say.

    Values: R and B hold the whole on every rank, P and S add up to it. Gradients: P holds the whole
    on every rank, the others add up to it (R as equal shares, as simulated ranks seed it).
    """
    dims, generator = one_tensor(mesh), torch.Generator().manual_seed(0)
    full, gradient = torch.randn(2, *SHAPE, dtype=torch.float64, generator=generator)
    for source, target in itertools.product(layouts(mesh), repeat=2):
        path = tree(
            source, [target], lambda move: 1.0, legal=lambda item: dims.legal("x", item), differentiable=True
        )
        program = Program(mesh, {"x": source}, {}, {"x": path}, {"x": target})
        programs = [rewrite(dims.graph, program, dims, rank=rank) for rank in range(mesh.num_devices)]
        leaves = [item.requires_grad_() for item in shares(full, source, dims, summed=P, seed=1)]
        results = [outputs[0] for outputs in run(programs, [{"x": leaf} for leaf in leaves])]
        seeds = shares(gradient, target, dims, summed=B, seed=2)
        for axis, placement in enumerate(target):
            seeds = [item / mesh.shape[axis] if placement == R else item for item in seeds]
        live = [index for index, item in enumerate(results) if item.requires_grad]  # others are zeros
        torch.autograd.backward([results[index] for index in live], [seeds[index] for index in live])
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        where = f"{show(source)} -> {show(target)} by {', '.join(map(str, path))}"
        for total in totals(results, target, dims, same=(R, B)):
            assert torch.allclose(total, full), f"value of {where}"
        for total in totals(grads, source, dims, same=(P,)):
            assert torch.allclose(total, gradient), f"gradient of {where}"


def random_price(seed: int) -> Callable[[Move], float]:
    return lambda move: random.Random(f"{seed} {move}").randint(0, 9)


@settings(max_examples=100)
@given(st.sampled_from([Mesh((2,)), Mesh((2, 2)), Mesh((2, 2, 2))]), st.integers(0, 999), st.data())
def test_a_path_is_as_cheap_as_the_cheapest_of_all(mesh: Mesh, seed: int, data: st.DataObject) -> None:
    dims, price, choices = one_tensor(mesh), random_price(seed), st.sampled_from(layouts(mesh))
    source, need = data.draw(choices), data.draw(choices)
    found = tree(source, [need], price, legal=lambda item: dims.legal("x", item), differentiable=True)
    everything = nx.DiGraph()
    everything.add_nodes_from(layouts(mesh))
    for layout in layouts(mesh):
        for move in moves(layout, interesting([source, need], differentiable=True)):
            if dims.legal("x", move.target):
                everything.add_edge(move.source, move.target, weight=price(move))
    assert sum(price(move) for move in found) == nx.dijkstra_path_length(everything, source, need)


WAYS = {R: 3.0, P: 1.0, B: 4.0}  # seconds of a move to each hub, and of one from it


@pytest.mark.parametrize(
    ("illegal", "through"), [((), P), ((P,), R), ((P, R), B), ((P, R, B), None), ((R, B), P)], ids=str
)
def test_where_the_cheapest_way_leads_over_an_illegal_layout_the_cheapest_legal_one_is_taken(
    illegal: tuple[Placement, ...], through: Placement | None
) -> None:
    """From rows to columns over P in 2 s, over R in 6, over B in 8, at once in 10."""

    def price(move: Move) -> float:
        return sum(WAYS.get(placement, 0.0) for placement in move.placements) or 10.0

    found = tree(
        (S,), [(Shard(1),)], price, legal=lambda layout: layout[0] not in illegal, differentiable=True
    )
    stops = [] if through is None else [(through,)]
    assert [move.target for move in found] == [*stops, (Shard(1),)]


def test_an_illegal_need_has_no_way() -> None:
    need = (Shard(1),)
    with pytest.raises(RuleError, match="no path"):
        tree((S,), [need], lambda move: 1.0, legal=lambda layout: layout != need, differentiable=True)


@settings(max_examples=100)
@given(st.integers(0, 999), st.floats(0, 1), st.data())
def test_whatever_is_illegal_a_path_is_the_cheapest_of_the_legal_ones(
    seed: int, share: float, data: st.DataObject
) -> None:
    every = [*itertools.product(PLACEMENTS, repeat=2)]
    source, need = data.draw(st.sampled_from(every)), data.draw(st.sampled_from(every))
    drawn = random.Random(seed)
    good = {source, need, *(layout for layout in every if drawn.random() < share)}
    price, placements = random_price(seed), interesting([source, need], differentiable=True)
    ways: nx.DiGraph[Layout] = nx.DiGraph()
    ways.add_nodes_from(good)
    for layout in good.intersection(itertools.product(*placements)):
        for move in moves(layout, placements):
            if move.target in good:
                ways.add_edge(move.source, move.target, weight=price(move))
    if not nx.has_path(ways, source, need):
        with pytest.raises(RuleError, match="no path"):
            tree(source, [need], price, legal=good.__contains__, differentiable=True)
        return
    found = tree(source, [need], price, legal=good.__contains__, differentiable=True)
    assert {move.target for move in found} <= good
    assert sum(map(price, found)) == nx.dijkstra_path_length(ways, source, need)


@settings(max_examples=100)
@given(st.integers(0, 999), st.booleans(), st.data())
def test_moves_to_several_uses_form_a_tree_of_legal_moves(
    seed: int, differentiable: bool, data: st.DataObject
) -> None:
    mesh = Mesh((2, 2))
    dims, choices = one_tensor(mesh), [item for item in layouts(mesh) if differentiable or B not in item]
    source = data.draw(st.sampled_from(choices))
    needs = data.draw(st.lists(st.sampled_from(choices), min_size=1, max_size=4))
    found = tree(
        source,
        needs,
        random_price(seed),
        legal=lambda item: dims.legal("x", item),
        differentiable=differentiable,
    )
    reached = {source}
    for move in found:
        assert move.source in reached and move.target not in reached and legal(move)
        reached.add(move.target)
    assert reached.issuperset(needs)
    assert differentiable or not any(B in layout for layout in reached)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([Mesh((2, 2)), Mesh((2, 2, 2))]), st.integers(0, 999), st.booleans(), st.data())
def test_within_a_network_a_tree_is_the_one_that_is_found_move_by_move(
    mesh: Mesh, seed: int, anywhere: bool, data: st.DataObject
) -> None:
    """Also of ways of equal cost the same one."""
    dims, price = one_tensor(mesh), random_price(seed)
    choices = st.sampled_from(layouts(mesh))
    source, needs = data.draw(choices), data.draw(st.lists(choices, min_size=1, max_size=3))
    every = interesting(layouts(mesh), differentiable=True)
    unpriced = paths(every, (), tuple(dims.legal("x", item) for item in itertools.product(*every)))
    nothing = np.zeros(len(unpriced.source))
    free = priced(unpriced, nothing, nothing)
    seconds = np.array([price(free.move(number)) for number in range(len(free.source))], dtype=np.float64)
    theirs = tree(
        source,
        needs,
        price,
        legal=lambda item: dims.legal("x", item),
        differentiable=True,
        through=free.layouts if anywhere else (),
    )
    assert theirs == tree_within(free, source, needs, seconds, differentiable=True, anywhere=anywhere)


def test_the_minor_axis_is_gathered_first_and_split_last() -> None:
    assert legal(Move(1, (S, S), (S, R))) and not legal(Move(0, (S, S), (R, S)))
    assert legal(Move(1, (S, R), (S, S))) and not legal(Move(0, (R, S), (S, S)))
    assert legal(Move(0, (S, Shard(1)), (R, Shard(1)))) and not legal(Move(0, (Shard(1), S), (S, S)))
    free = tree((S, S), [(R, S)], lambda move: 1.0, legal=lambda item: True, differentiable=True)
    assert [str(move) for move in free[:2]] == ["S(0)·S(0) -> S(0)·R", "S(0)·R -> R·R"]
