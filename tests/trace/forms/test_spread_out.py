"""Copies of expanded tensors stand in the graph, and count in memory; those that only reorder don't."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.core.graph import Graph
from autopar.trace.export import trace

aten = torch.ops.aten


class Heads(nn.Module):
    """Two heads of four numbers, spread over six."""

    def __init__(self, spread: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.spread = nn.Linear(8, 8), spread

    def forward(self, x: Tensor) -> Tensor:
        return self.spread(self.inner(x).view(4, 5, 2, 4).transpose(1, 2)).square()


def graph_of(spread: Callable[[Tensor], Tensor]) -> Graph:
    return trace(Heads(spread), (torch.randn(4, 5, 8),)).graph


def copies(graph: Graph) -> list[tuple[int, ...]]:
    return [
        graph.specs[item.operands[0]].shape for item in graph.operators if item.target is aten.clone.default
    ]


@pytest.mark.parametrize(
    "spread",
    [
        lambda k: k[:, :, None].expand(4, 2, 3, 5, 4).reshape(4, 6, 5, 4),
        lambda k: k[:, :, None].expand(4, 2, 3, 5, 4).contiguous().view(4, 6, 5, 4),
        lambda k: k[:, :, None].expand(4, 2, 3, 5, 4).flatten(1, 2),
    ],
    ids=["reshape", "contiguous", "flatten"],
)
def test_a_copy_of_an_expanded_tensor_is_an_operator(spread: Callable[[Tensor], Tensor]) -> None:
    assert copies(graph_of(spread)) == [(4, 2, 3, 5, 4)]


@pytest.mark.parametrize(
    "spread",
    [
        lambda k: k[:, :, None].expand(4, 2, 3, 5, 4),
        lambda k: k[:, :, None].expand(4, 2, 3, 5, 4).reshape(4, 2, 3, 5, 2, 2),
        lambda k: k.transpose(1, 2).contiguous().view(4, 5, 8),
        lambda k: k.transpose(1, 2).reshape(4, 5, 8),
    ],
    ids=["expand", "a view still", "contiguous", "reshape"],
)
def test_views_and_copies_that_only_reorder_are_none(spread: Callable[[Tensor], Tensor]) -> None:
    assert copies(graph_of(spread)) == []
