"""Gradients of weights are late beside sums: where, what fits, and that programs compute the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx

from autopar.core.mesh import Mesh
from autopar.rewrite.late_gradients import make_late
from tests.rewrite.test_overlap import calls, on_simulated_ranks

OURS = torch.ops.autopar
KEY = Mesh((2,)).key((0,))
WIDTH = 4
RESULT = 100  # bytes of a product's result


def program(*, move: str = "r_to_b", weight_late: bool = False) -> fx.Graph:
    """Two products of one activation that was converted, one with a bias, and a sum of both."""
    graph = fx.Graph()
    x, one, two, bias = (graph.placeholder(name) for name in ("x", "one", "two", "bias"))
    h = graph.call_function(torch.ops.aten.tanh.default, (x,))
    split = (1, 1, [1, 3]) if move == "s_to_b" else ()
    z = graph.call_function(getattr(OURS, move).default, (h, KEY, *split))
    left = graph.call_function(torch.ops.aten.linear.default, (z, one, bias))
    if weight_late:
        two = graph.call_function(torch.ops.aten.tanh.default, (two,))
    right = graph.call_function(torch.ops.aten.linear.default, (z, two))
    y = graph.call_function(torch.ops.aten.mul.Tensor, (left, right))
    graph.output((graph.call_function(OURS.p_to_r.default, (y, KEY)),))
    return graph


def late(graph: fx.Graph, *, room: float = math.inf, parts: tuple[tuple[int, int], ...] = ()) -> fx.Graph:
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    return make_late(graph, lambda step: RESULT, room=room, steps=order, segments=parts)


HEAD = ["tanh", "start_r_to_b"]


def test_gradients_of_all_weights_wait_behind_the_sum() -> None:
    found = calls(late(program()))
    promises, products = ["late_gradient"] * 3, ["late_linear"] * 2
    assert found == [*HEAD, *promises, "wait_r_to_b", *products, "mul", "p_to_r"]


def test_a_weight_that_is_not_at_hand_keeps_its_product() -> None:
    found = calls(late(program(weight_late=True)))
    rest = ["wait_r_to_b", "late_linear", "tanh", "linear", "mul", "p_to_r"]
    assert found == [*HEAD, *["late_gradient"] * 2, *rest]


def test_what_there_is_no_room_for_is_made_at_once() -> None:
    graph = program()
    assert calls(late(graph, room=RESULT - 1)) == calls(graph)
    found = calls(late(graph, room=RESULT))
    assert found.count("late_linear") == 1 and "linear" in found
    assert calls(late(graph, room=2 * RESULT)).count("late_linear") == 2


def test_what_is_computed_again_stays() -> None:
    graph = program()
    place = [node.name for node in graph.nodes].index("r_to_b_default")
    assert calls(late(graph, parts=((place, place + 2),))) == calls(graph)


def _inputs(move: str) -> list[dict[str, Tensor]]:
    """Both ranks hold the activation, or parts of one and three columns; weights are each rank's own."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    whole = made(3, WIDTH)
    parts = whole.detach().split([1, 3], 1) if move == "s_to_b" else [whole.detach()] * 2
    return [
        {
            "x": part.clone().requires_grad_(),
            "one": made(5, WIDTH),
            "two": made(5, WIDTH),
            "bias": made(5),
        }
        for part in parts
    ]


def _found(graph: fx.Graph, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
    results = on_simulated_ranks(graph, inputs)
    leaves = [item for rank in inputs for item in rank.values()]
    return [*results, *torch.autograd.grad(sum(item.sum() for item in results), leaves)]


@pytest.mark.parametrize("move", ["r_to_b", "s_to_b"])
def test_on_simulated_ranks_it_is_the_same_program(move: str) -> None:
    graph, inputs = program(move=move), _inputs(move)
    changed = late(graph)
    assert calls(changed)[1] == f"start_{move}"
    pairs = zip(_found(changed, inputs), _found(graph, inputs), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=1e-14, atol=1e-14) for ours, theirs in pairs)


def test_a_weight_in_the_place_of_another_is_found() -> None:
    graph, inputs = program(), _inputs("r_to_b")
    wrong = late(graph)
    promises = [node for node in wrong.nodes if "late_gradient" in node.name]
    promises[0].args, promises[2].args = promises[2].args, promises[0].args
    pairs = zip(_found(wrong, inputs), _found(graph, inputs), strict=True)
    assert not all(torch.allclose(ours, theirs) for ours, theirs in pairs)
