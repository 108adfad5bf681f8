"""Copies of weights from the host start early: where they stand, and that programs compute the same."""

from __future__ import annotations

import torch
from torch import fx

from autopar.core.mesh import Mesh
from autopar.core.program import Program
from autopar.rewrite.fetch_ahead import fetch_ahead
from autopar.runtime.saved.host_weights import fetch_target
from tests.rewrite.test_overlap import WIDTH, calls, on_simulated_ranks

NAMES = ("w0", "b0", "w1", "w2")
CPU = torch.device("cpu")


def program() -> tuple[fx.Graph, dict[str, int]]:
    """Linear layers, the first with a bias, the last with the first's matrix; and of which each node is."""
    graph, steps = fx.Graph(), dict[str, int]()
    x = graph.placeholder("x")
    inputs = {name: graph.placeholder(name) for name in NAMES}
    fetched: dict[str, fx.Node] = {}
    for step, names in enumerate((("w0", "b0"), ("w1",), ("w2",), ("w0",))):
        for name in names:
            if name not in fetched:
                fetched[name] = graph.call_function(fetch_target(), (inputs[name], CPU))
                steps[fetched[name].name] = step
        x = graph.call_function(torch.ops.aten.linear.default, (x, *(fetched[name] for name in names)))
        steps[x.name] = step
    graph.output((x,))
    return graph, steps


def early(*, ahead: tuple[str, ...] = NAMES, recompute: tuple[tuple[int, int], ...] = ()) -> fx.Graph:
    graph, steps = program()
    mesh = Mesh((1,))
    return fetch_ahead(
        graph, Program(mesh, {}, {}, {}, {}, recompute=recompute, on_host=NAMES, ahead=ahead), steps
    )


START, WAIT, FETCH = "start_fetch_regather", "wait_fetch_regather", "fetch_regather"


def test_what_an_operator_needs_starts_when_that_of_the_one_before_is_there() -> None:
    assert calls(early()) == [
        *(START, START, WAIT, WAIT, START, "linear", WAIT, START, "linear", WAIT, "linear", "linear")
    ]


def test_others_and_what_is_computed_again_are_fetched_at_once() -> None:
    first = [START, WAIT, START, FETCH, "linear"]
    assert calls(early(ahead=("w0", "w1"))) == [*first, WAIT, "linear", FETCH, "linear", "linear"]
    assert calls(early(recompute=((1, 2),))) == [
        *(START, START, WAIT, WAIT, START, "linear", FETCH, "linear", WAIT, "linear", "linear")
    ]


def test_on_a_simulated_rank_it_is_the_same_program() -> None:
    torch.manual_seed(0)
    rank = {name: torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for name in NAMES}
    rank |= {"b0": torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)}
    inputs = [rank | {"x": torch.randn(2, WIDTH, dtype=torch.float64)}] * 2
    found = []
    for graph in (program()[0], early()):
        (result, _) = on_simulated_ranks(graph, inputs)
        found.append([result, *torch.autograd.grad(result.sum(), list(rank.values()))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
