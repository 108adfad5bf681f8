"""Which gradient sums leave the program, and which must stay."""

from __future__ import annotations

import torch
from torch import fx

import autopar.runtime.collectives.placement_moves  # noqa: F401  (registers the operators)
from autopar.rewrite.defer_sync import DeferredSync, defer
from autopar.runtime.executable import GatherCall

r_to_b = torch.ops.autopar.r_to_b.default
s_to_b, s_to_r = torch.ops.autopar.s_to_b.default, torch.ops.autopar.s_to_r.default
relu = torch.ops.aten.relu.default


def program() -> fx.Graph:
    """Four weights: a chain over two axes, a chain after which two calls follow, one that is used
    as R too, one whose chain comes after a call."""
    graph = fx.Graph()
    chain, fork, mixed, late = (graph.placeholder(name) for name in ("chain", "fork", "mixed", "late"))
    a = graph.call_function(
        relu, (graph.call_function(r_to_b, (graph.call_function(r_to_b, (chain, "a@2x2")), "b@2x2")),)
    )
    shared = graph.call_function(r_to_b, (fork, "b@2x2"))
    b, c = graph.call_function(relu, (shared,)), graph.call_function(relu, (shared,))
    d = graph.call_function(relu, (graph.call_function(r_to_b, (mixed, "a@2x2")),))
    e = graph.call_function(r_to_b, (graph.call_function(relu, (late,)), "a@2x2"))
    graph.output((a, b, c, d, mixed, e))
    return graph


def test_leading_chains_of_parameters_leave_the_program() -> None:
    before = program()
    printed = str(before)
    after, keys = defer(before, ["chain", "fork", "mixed", "late"])
    assert keys == {"chain": DeferredSync("ab@2x2"), "fork": DeferredSync("b@2x2")}
    assert str(before) == printed
    left = [str(node.args[0]) for node in after.nodes if node.target is r_to_b]
    assert left == ["mixed", "relu_default_4"]


def test_only_parameters_are_touched() -> None:
    _, keys = defer(program(), ["fork"])
    assert keys == {"fork": DeferredSync("b@2x2")}


def test_weights_that_are_gathered_once_leave_their_gathers() -> None:
    graph = fx.Graph()
    first, second, kept = (graph.placeholder(name) for name in ("first", "second", "kept"))
    rest = (0, 1, [2, 2])
    a = graph.call_function(s_to_b, (graph.call_function(r_to_b, (first, "b@2x2")), "a@2x2", *rest))
    b = graph.call_function(r_to_b, (graph.call_function(s_to_r, (second, "a@2x2", *rest)), "a@2x2"))
    c = graph.call_function(s_to_b, (kept, "a@2x2", *rest))
    graph.output(tuple(graph.call_function(relu, (item,)) for item in (a, b, c)))
    after, found = defer(graph, ["first", "second", "kept"], gathered_once=["first", "second"])
    gather = GatherCall("s_to_b", ("a@2x2", *rest))
    assert found == {"first": DeferredSync("b@2x2", (gather,)), "second": DeferredSync(None, (gather,))}
    assert [str(node.args[0]) for node in after.nodes if node.target is s_to_b] == ["kept"]
