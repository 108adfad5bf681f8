"""Edges are put in the order of their destinations, and nothing that the user sees changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.graph import Graph, Ref
from autopar.trace.export import trace
from autopar.trace.rewrites.edge_operators import PICK, PLACE
from tests.proof.models import Model, serial
from tests.trace.graph_nets import VERTICES, edges

Forward = Callable[..., Tensor | tuple[Tensor, ...]]


class Forwards(nn.Module):
    """A function of vertices, edges and features of edges, with weights of edges that learn."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 70, dtype=torch.float64))
        self.function = forward

    def forward(self, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self, x, edge_index, features)


def added(messages: Tensor, target: Tensor) -> Tensor:
    return messages.new_zeros(VERTICES, messages.shape[1]).index_add(0, target, messages)


def gated(net: nn.Module, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor:
    """Features of edges and weights that learn, row by row."""
    source, target = edge_index
    return added(torch.tanh(x[source] + features) * net.weight[:, None] + x[target], target)


def along_edges(net: nn.Module, x: Tensor, edge_index: Tensor, features: Tensor) -> tuple[Tensor, ...]:
    """What leaves by edge, too."""
    source, target = edge_index
    messages = torch.exp(x[source] - x[target])
    return messages * features, added(messages, target)


def against_order(net: nn.Module, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor:
    """An operator that goes by the order of edges, between others."""
    source, target = edge_index
    return added(F.relu((x[source] * features).cumsum(0)) + features.flip(0), target)


def halved(net: nn.Module, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor:
    """Two results of one operator."""
    source, target = edge_index
    first, second = torch.cat((x[source], features), 1).chunk(2, 1)
    return added(torch.sigmoid(first) * second, target)


def both_ways(net: nn.Module, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor:
    """Messages that are added up at either end."""
    source, target = edge_index
    messages = torch.tanh(x[source] + x[target])
    return added(messages, target) - added(messages, source)


def dropped(net: nn.Module, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor:
    """A random mask of edges."""
    source, target = edge_index
    return added(F.dropout(torch.tanh(x[source]), 0.4, net.training) * features, target)


def placed_again(net: nn.Module, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor:
    """What is added up at vertices is placed again, among clusters of them."""
    source, target = edge_index
    clusters = torch.tensor([4, 1, 0, 3, 2]).repeat(5)[:VERTICES]
    sums = torch.tanh(added(torch.tanh(x[source] + features), target))
    return sums.new_zeros(5, sums.shape[1]).index_add(0, clusters, sums)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(VERTICES, 4, dtype=torch.float64, generator=generator).requires_grad_()
    return x, edges(), torch.randn(70, 4, dtype=torch.float64, generator=generator).requires_grad_()


def indices(graph: Graph) -> list[Tensor]:
    """Where rows are placed, in the order of the graph."""
    values = {item.name: item.value for item in graph.inputs if item.value is not None}
    return [values[item.operands[1]] for item in graph.operators if item.target is PLACE]


FORWARDS = [gated, along_edges, against_order, halved, both_ways, dropped, placed_again]


@pytest.mark.parametrize("forward", FORWARDS)
def test_the_graph_computes_what_the_model_does(forward: Forward) -> None:
    model, (x, edge_index, features) = Forwards(forward), inputs()
    graph = trace(model, (x, edge_index, features)).graph
    assert any(bool((index.diff() >= 0).all()) for index in indices(graph)), "no edges are in order"
    given = {"input_0": x, "input_2": features, "weight": model.weight}
    known = {item.name: given.get(item.target, item.value) for item in graph.inputs}
    tensors = {name: value for name, value in known.items() if value is not None}
    found = serial(Model(graph, tensors, seed=3))
    torch.manual_seed(3)
    wanted = model(x, edge_index, features)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for name, value in zip(graph.outputs, wanted, strict=True):
        torch.testing.assert_close(found[name], value)
    sum(each.square().sum() for each in wanted).backward()  # type: ignore[union-attr]
    sum(found[name].square().sum() for name in graph.outputs).backward()  # type: ignore[union-attr]
    for item in graph.inputs:
        if item.target in given and given[item.target].grad is not None:
            torch.testing.assert_close(found[item.name].grad, given[item.target].grad)


def test_edges_that_are_in_order_stay_as_they_are() -> None:
    x, edge_index, features = inputs()
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    graph = trace(Forwards(dropped), (x, edge_index, features)).graph
    assert torch.equal(indices(graph)[0], edge_index[1])
    assert not any("drawn" in item.name for item in graph.operators)


def test_what_comes_in_by_edge_is_picked_once() -> None:
    graph = trace(Forwards(gated), inputs()).graph
    picked = [item.args[0] for item in graph.operators if item.target is PICK]
    assert picked.count(Ref("input_2")) == 1 and picked.count(Ref("weight")) == 1


def test_models_that_add_up_no_rows_are_left_alone() -> None:
    """Of a table of relative positions rows are picked as they were."""

    def biased(net: nn.Module, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor:
        return x[torch.arange(VERTICES).flip(0)] * 2

    graph = trace(Forwards(biased), inputs()).graph
    assert all(item.target not in (PICK, PLACE) for item in graph.operators)
