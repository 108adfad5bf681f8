"""Keys and values that were spread over the heads that share them go to attention as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.core.graph import Graph, Operator
from autopar.trace.export import trace
from autopar.trace.target import Target

aten = torch.ops.aten
HEADS, SHARED, LENGTH, WIDTH = 4, 2, 6, 4
Spread = Callable[[Tensor], Tensor]


class Shared(nn.Module):
    """Four heads of queries, two of keys and values, which `spread` gives to all."""

    def __init__(self, spread: Spread, *, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.spread, self.masked, self.dropout = spread, masked, dropout
        self.inner = nn.Linear(8, (HEADS + 2 * SHARED) * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        q, k, v = heads.split([HEADS, SHARED, SHARED], 1)
        mask = (torch.arange(LENGTH) % 3 > 0)[None] if self.masked else None
        y = F.scaled_dot_product_attention(
            q, self.spread(k), self.spread(v), mask, self.dropout, is_causal=not self.masked
        )
        return y.square()


def each(x: Tensor) -> Tensor:
    """Each head twice in a row, as models write it."""
    batch = len(x)
    return x[:, :, None].expand(batch, SHARED, 2, LENGTH, WIDTH).reshape(batch, HEADS, LENGTH, WIDTH)


def flat(x: Tensor) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)


def in_turns(x: Tensor) -> Tensor:
    """All heads, and all once more."""
    batch = len(x)
    return x[:, None].expand(batch, 2, SHARED, LENGTH, WIDTH).reshape(batch, HEADS, LENGTH, WIDTH)


def scaled(x: Tensor) -> Tensor:
    return each(x) * 2


def graph_of(model: nn.Module) -> Graph:
    return trace(model, (torch.randn(4, LENGTH, 8),)).graph


def attention(graph: Graph) -> Operator:
    found = [item for item in graph.operators if item.target is aten.scaled_dot_product_attention.default]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("spread", [each, flat])
def test_shared_heads_are_not_spread(spread: Spread) -> None:
    graph = graph_of(Shared(spread))
    assert attention(graph).kwargs["enable_gqa"] is True
    assert [graph.specs[name].shape[1] for name in attention(graph).operands] == [HEADS, SHARED, SHARED]
    assert not any(item.target is aten.expand.default for item in graph.operators)


@pytest.mark.parametrize(
    "model",
    [Shared(in_turns), Shared(scaled), Shared(each, masked=True), Shared(each, dropout=0.5)],
    ids=["in turns", "scaled", "masked", "dropout"],
)
def test_others_stay(model: nn.Module) -> None:
    found = attention(graph_of(model))
    assert "enable_gqa" not in found.kwargs


def test_casts_are_of_what_is_not_spread() -> None:
    class Cast(Shared):
        def forward(self, x: Tensor) -> Tensor:
            keys, values = (self.spread(part).bfloat16() for part in (x[:, :SHARED], x[:, SHARED:]))
            return F.scaled_dot_product_attention(x.bfloat16(), keys, values, is_causal=True)

    graph = trace(Cast(each), (torch.randn(4, HEADS, LENGTH, WIDTH),)).graph
    found = attention(graph)
    assert found.kwargs["enable_gqa"] is True
    specs = [graph.specs[name] for name in found.operands[1:]]
    assert [(spec.shape[1], spec.dtype) for spec in specs] == 2 * [(SHARED, torch.bfloat16)]


@pytest.mark.parametrize("force", ["batch", "domain", "filter"])
def test_values_are_those_of_spread_heads(force: str) -> None:
    target = Target(Shared(each), (torch.randn(4, LENGTH, 8),), {}, lambda y: y.mean(), "")
    report = api.verify(target, ClusterSpec.local(2), steps=2, force=force, changes=0)
    assert report.passed, report
