"""Exchanges of activations start early: where they stand, in which order, and what they compute."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from autopar.core.mesh import Mesh
from autopar.rewrite.hoist import hoist, is_ordered
from tests.rewrite.test_overlap import calls, on_simulated_ranks

OURS = torch.ops.autopar
MESH = Mesh((2, 2))
KEYS = [MESH.key((axis,)) for axis in (0, 1)]
MOVES = ("p_to_r", "p_to_b", "max_reduce")  # the last one is never hoisted


def early(graph: fx.Graph, *, room: float = math.inf, parts: tuple[tuple[int, int], ...] = ()) -> fx.Graph:
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    return hoist(graph, lambda node: 8, room=room, steps=order, segments=parts)


def branches() -> fx.Graph:
    """Two branches whose sums are needed behind both."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(torch.ops.aten.tanh.default, (x,))
    two = graph.call_function(torch.ops.aten.exp.default, (x,))
    sums = [graph.call_function(OURS.p_to_r.default, (each, KEYS[0])) for each in (one, two)]
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, tuple(sums)),))
    return graph


def test_a_sum_starts_where_its_input_is_made() -> None:
    assert calls(early(branches())) == ["tanh", "start_p_to_r", "exp", "wait_p_to_r", "p_to_r", "mul"]


def test_what_has_no_room_or_is_computed_again_stays() -> None:
    graph = branches()
    assert calls(early(graph, room=7)) == calls(graph)
    place = [node.name for node in graph.nodes].index("p_to_r_default")
    assert calls(early(graph, parts=((place, place + 1),))) == calls(graph)


def test_on_simulated_ranks_it_is_the_same_program() -> None:
    inputs = [{"x": torch.randn(3, dtype=torch.float64, requires_grad=True)} for _ in range(2)]
    found: list[Sequence[Tensor]] = []
    for graph in (branches(), early(branches())):
        results = on_simulated_ranks(graph, inputs)
        leaves = [rank["x"] for rank in inputs]
        found.append([*results, *torch.autograd.grad(sum(item.sum() for item in results), leaves)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def _program(draw: random.Random, spare: random.Random) -> fx.Graph:
    """A random program; what a rank computes beside what all do comes from `spare`."""
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    for number in range(draw.randint(2, 14)):
        if spare.random() < 0.5:
            graph.call_function(torch.ops.aten.exp.default, (draw_from(values, spare),))
        source = draw_from(values, draw)
        name = draw.choice((*MOVES, "tanh", "tanh", "tanh"))
        if name == "tanh":
            values.append(graph.call_function(torch.ops.aten.tanh.default, (source,)))
            continue
        args = (source, draw.choice(KEYS))
        made = graph.create_node(
            "call_function", getattr(OURS, name).default, args, name=f"exchange_{number}"
        )
        values.append(made)
    graph.output((values[-1],))
    return graph


def draw_from(values: Sequence[fx.Node], draw: random.Random) -> fx.Node:
    return draw.choice(list(values))


def _order(graph: fx.Graph) -> list[tuple[str, object]]:
    """What ranks meet in, in the order of its beginnings: which exchange, and its group."""
    found = []
    for node in graph.nodes:
        if is_ordered(node):
            waits = [user.name for user in node.users if "autopar.wait_" in str(user.target)]
            found.append((waits[0] if "autopar.start_" in str(node.target) else node.name, node.args[1]))
    return found


def check_order(seed: int, spares: tuple[int, int], rooms: tuple[float, float]) -> None:
    """Ranks that compute different things, and hoist by different rooms, keep the order of before."""
    wanted = None
    for spare, room in zip(spares, rooms, strict=True):
        graph = _program(random.Random(seed), random.Random(spare))
        changed = early(graph, room=room)
        changed.lint()
        assert _order(changed) == _order(graph)
        assert wanted in (None, _order(changed))
        wanted = _order(changed)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(0, 99), st.integers(0, 99)),
    st.tuples(*[st.sampled_from([0, math.inf])] * 2),
)
def test_uneven_ranks_keep_one_order(seed: int, spares: tuple[int, int], rooms: tuple[float, float]) -> None:
    check_order(seed, spares, rooms)
