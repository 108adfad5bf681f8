"""Masks that follow from numbers alone are said to attention's kernel in its own words, and others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.core.graph import Graph, Operator
from autopar.trace.attention.row_attention import ROWS
from autopar.trace.export import trace
from autopar.trace.target import Target

aten = torch.ops.aten
LENGTH, WIDTH = 6, 4
Mask = Callable[[int], Tensor]


class Attention(nn.Module):
    """Two heads under a mask that is made anew at each call, for (batch, LENGTH, 2 * WIDTH)."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.inner = mask, nn.Linear(2 * WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).view(*x.shape[:2], 3, 2, WIDTH).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        mask = self.mask(len(x))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square()


def positions() -> tuple[Tensor, Tensor]:
    rows = torch.arange(LENGTH)
    return rows[:, None], rows[None]


def full(batch: int) -> Tensor:
    return (torch.arange(LENGTH) >= 0)[None, None, :, None].expand(batch, -1, LENGTH, LENGTH)


def zeros(batch: int) -> Tensor:
    return torch.zeros(batch, 1, LENGTH, LENGTH)


def causal(batch: int) -> Tensor:
    query, key = positions()
    return (key <= query)[None, None].expand(batch, 1, -1, -1)


def triangle(batch: int) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def added(batch: int) -> Tensor:
    hidden = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min)
    return hidden.triu(1)[None, None].expand(batch, 1, -1, -1)


def sentences(batch: int) -> Tensor:
    """Rows see what comes before them in their own sentence: all of a row are one here."""
    query, key = positions()
    of = (torch.arange(LENGTH) > LENGTH).cumsum(0).expand(batch, -1)
    each = torch.arange(batch)[:, None, None, None]
    alike = of[each, query[None, None]] == of[each, key[None, None]]
    return (key <= query) & alike


def wide_window(batch: int) -> Tensor:
    query, key = positions()
    return (key <= query) & (key > query - LENGTH)


def window(batch: int) -> Tensor:
    query, key = positions()
    return (key <= query) & (key > query - 3)


def backwards(batch: int) -> Tensor:
    query, key = positions()
    return key >= query


def slight(batch: int) -> Tensor:
    return torch.full((LENGTH, LENGTH), -3.0).triu(1)


def of_samples(batch: int) -> Tensor:
    query, key = positions()
    return (key <= query)[None, None] | (torch.arange(batch)[:, None, None, None] == 0)


def of_heads(batch: int) -> Tensor:
    query, key = positions()
    return (key <= query + torch.arange(2)[:, None, None])[None].expand(batch, -1, -1, -1)


def graph_of(mask: Mask, batch: int = 4) -> Graph:
    return trace(Attention(mask), (torch.randn(batch, LENGTH, 2 * WIDTH),)).graph


def attention(graph: Graph) -> Operator:
    found = [item for item in graph.operators if item.target is aten.scaled_dot_product_attention.default]
    assert len(found) == 1
    return found[0]


def is_causal(item: Operator) -> bool:
    return item.args[5:] == (True,)


@pytest.mark.parametrize("mask", [full, zeros])
def test_a_mask_that_hides_nothing_goes(mask: Mask) -> None:
    graph = graph_of(mask)
    assert len(attention(graph).operands) == 3 and not is_causal(attention(graph))
    assert all(graph.specs[name].shape[-2:] != (LENGTH, LENGTH) for name in graph.specs)


@pytest.mark.parametrize("mask", [causal, triangle, added, sentences, wide_window])
def test_a_mask_that_hides_what_comes_later_is_causal(mask: Mask) -> None:
    found = attention(graph_of(mask))
    assert len(found.operands) == 3 and is_causal(found)


@pytest.mark.parametrize(("mask", "band"), [(window, (2, 0)), (backwards, (0, None))])
def test_windows_are_attention_in_blocks(
    mask: Mask, band: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(attention(graph_of(mask)).operands) == 4  # of few scores a mask costs little
    monkeypatch.setattr("autopar.trace.rewrites.known_masks.FEWEST_SCORES", 0)
    (found,) = [item for item in graph_of(mask).operators if item.target is ROWS]
    assert len(found.operands) == 3 and found.args[6:8] == band


def strictly_before(batch: int) -> Tensor:
    """The first row sees nothing: where a finite number hides all, that is all alike."""
    return torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(0)


def strictly_after(batch: int) -> Tensor:
    query, key = positions()
    return torch.zeros(LENGTH, LENGTH).masked_fill(key <= query, -1e30)


@pytest.mark.parametrize("mask", [strictly_before, strictly_after])
def test_rows_that_a_finite_number_hides_as_a_whole_keep_their_mask(
    mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.trace.rewrites.known_masks.FEWEST_SCORES", 0)
    assert len(attention(graph_of(mask)).operands) == 4


@pytest.mark.parametrize("mask", [slight, of_samples, of_heads])
def test_other_masks_stay(mask: Mask) -> None:
    found = attention(graph_of(mask))
    assert len(found.operands) == 4 and not is_causal(found)


def test_a_mask_of_the_input_stays() -> None:
    class Masked(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.mask = lambda batch: mask  # type: ignore[assignment, return-value]
            return super().forward(x)

    graph = trace(Masked(full), (torch.randn(4, LENGTH, 2 * WIDTH), full(4).clone())).graph
    assert len(attention(graph).operands) == 4


def test_a_mask_of_a_buffer_stays() -> None:
    """It may be written between two steps."""
    model = Attention(full)
    model.register_buffer("held", triangle(4))
    model.mask = lambda batch: model.held
    graph = trace(model, (torch.randn(4, LENGTH, 2 * WIDTH),)).graph
    assert len(attention(graph).operands) == 4


def test_masks_of_large_batches_are_computed_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.trace.rewrites.known_masks.MOST_MASK_BYTES", 8 * LENGTH * LENGTH)
    assert is_causal(attention(graph_of(causal, 4096)))
    monkeypatch.setattr("autopar.trace.rewrites.known_masks.MOST_MASK_BYTES", 0)  # by its form alone
    assert is_causal(attention(graph_of(causal, 4096)))


@pytest.mark.parametrize("mask", [full, sentences, window, backwards])
@pytest.mark.parametrize("force", ["batch", "domain", "filter"])
def test_values_are_those_of_the_written_mask(
    mask: Mask, force: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where queries, or heads, lie in shards."""
    monkeypatch.setattr("autopar.trace.rewrites.known_masks.FEWEST_SCORES", 0)
    target = Target(Attention(mask), (torch.randn(4, LENGTH, 2 * WIDTH),), {}, lambda y: y.mean(), "")
    report = api.verify(target, ClusterSpec.local(2), steps=2, force=force, changes=0)
    assert report.passed, report
