"""Gathers of weights start early: where they stand, what fits, and that programs compute the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx

from autopar.core.graph import TensorSpec
from autopar.core.mesh import Mesh
from autopar.proof.simulated import simulate
from autopar.rewrite.overlap import overlap, room_of
from autopar.runtime.collectives.placement_moves import SUMMED

OURS = torch.ops.autopar
KEY = Mesh((2,)).key((0,))
WIDTH = 4
FULL = WIDTH * WIDTH * 8  # bytes of a weight


def program(
    layers: int, *, sizes: tuple[int, int] = (3, 1), cast: torch.dtype | None = None, ending: str = ""
) -> fx.Graph:
    """Linear layers with weights in shards, a bias for the first, and a reduction of the result; weights and
    bias are `cast` before they are gathered."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    matrices = [graph.placeholder(f"w{number}") for number in range(layers)]
    bias = graph.placeholder("b")
    regather, once = (getattr(OURS, "s_to_b" + ending + name).default for name in ("_regather", ""))

    def casted(node: fx.Node) -> fx.Node:
        return graph.call_function(torch.ops.aten.to.dtype, (node, cast)) if cast is not None else node

    for number, weight in enumerate(matrices):
        full = graph.call_function(regather, (casted(weight), KEY, 0, 1, list(sizes)))
        args = [x, full]
        if number == 0:
            args.append(graph.call_function(once, (casted(bias), KEY, 0, 1, list(sizes))))
        x = graph.call_function(torch.ops.aten.linear.default, tuple(args))
        x = graph.call_function(torch.ops.aten.tanh.default, (x,))
    graph.output((graph.call_function(OURS.p_to_r.default, (x, KEY)),))
    return graph


def weights(layers: int) -> dict[str, TensorSpec]:
    matrix, bias = TensorSpec((WIDTH, WIDTH), torch.float64), TensorSpec((WIDTH,), torch.float64)
    return {f"w{number}": matrix for number in range(layers)} | {"b": bias}


def calls(graph: fx.Graph) -> list[str]:
    return [node.target._opname for node in graph.nodes if node.op == "call_function"]


def early(
    graph: fx.Graph, layers: int, *, room: float = math.inf, parts: tuple[tuple[int, int], ...] = ()
) -> fx.Graph:
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    return overlap(graph, weights(layers), room=room, steps=order, segments=parts)


def test_each_group_starts_behind_the_group_before() -> None:
    assert calls(early(program(3), 3)) == [
        *("start_s_to_b_regather", "start_s_to_b", "wait_s_to_b_regather", "wait_s_to_b"),
        *("start_s_to_b_regather", "linear", "tanh", "wait_s_to_b_regather"),
        *("start_s_to_b_regather", "linear", "tanh", "wait_s_to_b_regather", "linear", "tanh", "p_to_r"),
    ]


def test_a_group_that_takes_more_than_the_room_stays_where_it_is() -> None:
    graph = program(3)
    before = calls(graph)
    assert calls(early(graph, 3, room=FULL - 1)) == before
    found = calls(early(graph, 3, room=FULL))  # the first one has a bias, too
    assert found[:2] == before[:2] and found.count("start_s_to_b_regather") == 2
    assert room_of(None, 5.0) == math.inf and room_of(100, 60) == 10


def test_casts_start_with_their_gathers() -> None:
    assert calls(early(program(2, cast=torch.bfloat16, ending="_wide"), 2)) == [
        *("to", "start_s_to_b_wide_regather", "to", "start_s_to_b_wide"),
        *("wait_s_to_b_wide_regather", "wait_s_to_b_wide", "to", "start_s_to_b_wide_regather"),
        *("linear", "tanh", "wait_s_to_b_wide_regather", "linear", "tanh", "p_to_r"),
    ]


def test_the_room_of_a_cast_is_that_of_its_full_tensor_and_its_largest_shard() -> None:
    graph = program(2, cast=torch.bfloat16, ending="_wide")
    needed = FULL // 4 + FULL // 4 * 3 // 4
    second = "start_s_to_b_wide_regather"
    assert calls(early(graph, 2, room=needed)).count(second) == 1  # the first one has a bias, too
    assert calls(early(graph, 2, room=needed - 1)) == calls(graph)


def test_what_is_cast_in_a_part_that_is_computed_again_stays_there() -> None:
    graph = program(2, cast=torch.bfloat16, ending="_wide")
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    first = order["to_dtype"]
    assert calls(early(graph, 2, parts=((first, first + 1),))).count("start_s_to_b_wide_regather") == 1


@pytest.mark.parametrize("ending", SUMMED.values())
def test_casts_on_simulated_ranks_are_the_same_program(ending: str) -> None:
    graph, inputs = program(3, cast=torch.float32, ending=ending), _inputs(3, x=torch.float32)
    ours, theirs = (on_simulated_ranks(each, inputs) for each in (graph, early(graph, 3)))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_what_is_computed_again_keeps_its_gathers() -> None:
    graph = program(2)
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    second = order["s_to_b_regather_default_1"]
    assert calls(early(graph, 2, parts=((second, second + 2),))).count("start_s_to_b_regather") == 1


def test_ranks_of_uneven_parts_have_one_order() -> None:
    uneven = [calls(early(program(3, sizes=sizes), 3)) for sizes in ((3, 1), (2, 2), (4, 0))]
    assert uneven[0] == uneven[1] == uneven[2]


def on_simulated_ranks(graph: fx.Graph, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
    """What both ranks return of a program."""
    values: list[dict[fx.Node, Tensor]] = [{}, {}]
    for node in graph.nodes:
        args = [fx.node.map_arg(node.args, lambda old, own=own: own[old]) for own in values]
        if node.op == "output":
            return [own[0] for (own,) in args]
        if node.op == "placeholder":
            results = [rank[node.target] for rank in inputs]
        elif node.target.namespace == "autopar":
            results = simulate(node.target, [(own, {}) for own in args])
        else:
            results = [node.target(*own) for own in args]
        for own, result in zip(values, results, strict=True):
            own[node] = result
    raise AssertionError("no output")


def _inputs(layers: int, *, x: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    full = {f"w{number}": torch.randn(WIDTH, WIDTH, dtype=torch.float64) for number in range(layers)}
    full["b"] = torch.randn(WIDTH, dtype=torch.float64)
    parts = {name: item.split([3, 1]) for name, item in full.items()}
    return [
        {name: part[rank].clone().requires_grad_() for name, part in parts.items()}
        | {"x": torch.randn(2, WIDTH, dtype=x)}
        for rank in range(2)
    ]


def test_on_simulated_ranks_it_is_the_same_program() -> None:
    graph, inputs = program(3), _inputs(3)
    found = []
    for each in (graph, early(graph, 3)):
        results = on_simulated_ranks(each, inputs)
        leaves = [item for rank in inputs for item in rank.values() if item.requires_grad]
        found.append([*results, *torch.autograd.grad(sum(item.sum() for item in results), leaves)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_gather_that_is_waited_for_in_the_place_of_another_is_found() -> None:
    graph, inputs = program(3), _inputs(3)
    wrong = early(graph, 3)
    waits = [node for node in wrong.nodes if node.op == "call_function" and "wait" in node.target._opname]
    first, last = waits[0].args[0], waits[-1].args[0]
    waits[-1].args = (first, *waits[-1].args[1:])
    assert last is not first
    ours, theirs = (on_simulated_ranks(each, inputs)[0] for each in (wrong, graph))
    assert not torch.equal(ours, theirs)


def test_gathers_of_other_tensors_stay() -> None:
    graph = program(2)
    assert calls(overlap(graph, {}, room=math.inf, steps={}, segments=())) == calls(graph)
