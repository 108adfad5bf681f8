"""Models whose attention runs as a ring, or on rows that begin anywhere, are the serial ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Pins
from autopar.core.mesh import Mesh
from autopar.core.recompute import Recompute
from autopar.errors import InputError
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.trace.attention.row_attention import ROWS
from autopar.trace.target import Target
from costdb.database import Database

ATTENTION = "scaled_dot_product_attention"


class Block(nn.Module):
    """Attention of `heads` query heads that share `shared` heads of keys, for (batch, length, 8), or under a
    mask that is made of the length."""

    def __init__(
        self,
        *,
        causal: bool = False,
        heads: int = 4,
        shared: int = 2,
        dropout: float = 0.0,
        mask: Callable[[int], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.heads, self.shared, self.dropout = causal, heads, shared, dropout
        self.mask = mask
        self.query, self.key, self.value = (
            nn.Linear(8, 4 * heads),
            nn.Linear(8, 4 * shared),
            nn.Linear(8, 4 * shared),
        )
        self.out = nn.Linear(4 * heads, 8)

    def forward(self, x: Tensor) -> Tensor:
        def by_head(y: Tensor, heads: int) -> Tensor:
            return y.view(*y.shape[:2], heads, -1).transpose(1, 2)

        q, k, v = (
            by_head(self.query(x), self.heads),
            *(by_head(y(x), self.shared) for y in (self.key, self.value)),
        )
        how = {"is_causal": self.causal, "enable_gqa": self.heads != self.shared, "dropout_p": self.dropout}
        mask = self.mask(x.shape[1]) if self.mask else None
        y = F.scaled_dot_product_attention(q, k, v, mask, **how)  # type: ignore[arg-type]
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, **block: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(**block), Block(**block))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


def proved(
    model: nn.Module, ranks: int, *, length: int = 13, mask: Tensor | None = None, **request: Any
) -> Report:
    torch.manual_seed(0)
    x = torch.randn(4, length, 8)
    inputs = (x,) if mask is None else (x, mask)
    target = Target(model, inputs, {}, lambda y: y.square().mean(), "")
    asked = Request(measure=False, alternatives=False, **request)
    with Database.in_memory(autopar.__file__) as database:
        return check(target, ClusterSpec.local(ranks), asked, steps=2, processes=False, database=database)


def pinned(*ways: str) -> Pins:
    """The attention of both blocks, pinned."""
    return dict.fromkeys((ATTENTION, f"{ATTENTION}_1"), ways)


def window(length: int) -> Tensor:
    """The last four keys, a row's own among them."""
    after = torch.arange(length) - torch.arange(length)[:, None]
    return (after <= 0) & (after > -4)


def shown(batch: int, length: int) -> Tensor:
    """Packed documents, each of which sees what comes before in itself, and a sample with padding."""
    document = torch.arange(length).div(4, rounding_mode="floor")
    seen = (document == document[:, None]).tril().expand(batch, 1, -1, -1).clone()
    seen[-1, ..., -3:] = False
    return seen


def hiding(batch: int, length: int) -> Tensor:
    """What hides by the least float, rows that lie in the padding as a whole."""
    hidden = torch.zeros(batch, 1, length, length)
    hidden[0, ..., length - 4 :] = hidden[0, :, length - 4 :] = torch.finfo(torch.float32).min
    return hidden


def padding(batch: int, length: int) -> Tensor:
    """The keys of each sample, alike for all rows."""
    lengths = torch.arange(batch) + length - batch
    return (torch.arange(length) < lengths[:, None])[:, None, None]


class Masked(Net):
    """Under a mask that the caller gives."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            block.mask = lambda length: mask
        return super().forward(x)


class Biased(Net):
    """With a trained bias for each head, of rows and keys or of keys alone."""

    def __init__(self, rows: int, **block: Any) -> None:
        super().__init__(**block)
        self.bias = nn.Parameter(torch.randn(4, rows, 13))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.mask = lambda length: self.bias
        return super().forward(x)


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("mask", [shown, hiding, padding])
def test_keys_travel_under_a_mask(ranks: int, mask: Callable[[int, int], Tensor]) -> None:
    report = proved(Masked(), ranks, pins=pinned("ring"), mask=mask(4, 13))
    assert report.passed and ways_of(report) == {("ring",)}, report


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("rows", [1, 13])
def test_keys_travel_beside_a_trained_bias(ranks: int, rows: int) -> None:
    report = proved(Biased(rows), ranks, pins=pinned("ring"))
    assert report.passed and ways_of(report) == {("ring",)}, report


@pytest.mark.parametrize(
    "ways", [["b0", "ring"], ["ring", "b1"], ["q", "ring"], ["ring", "ring"], ["k", "q"], ["k", "k"]]
)
def test_masks_and_biases_go_with_other_splits(ways: list[str]) -> None:
    for model, mask in ((Masked(), shown(4, 13)), (Masked(), padding(4, 13)), (Biased(13), None)):
        report = proved(model, 4, mesh=Mesh((2, 2)), pins=pinned(*ways), mask=mask)
        assert report.passed and ways_of(report) == {tuple(ways)}, report


def neighbourhood(length: int) -> Tensor:
    """Two keys on each side, as an encoder's windows are."""
    after = torch.arange(length) - torch.arange(length)[:, None]
    return (after <= 2) & (after >= -2)


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("way", ["ring", "q"])
@pytest.mark.parametrize("mask", [window, neighbourhood])
def test_windows_over_a_split_sequence_are_serial(
    ranks: int, way: str, mask: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.trace.rewrites.known_masks.FEWEST_SCORES", 0)
    report = proved(Net(mask=mask), ranks, pins=pinned(way))
    assert report.passed and ways_of(report) == {(way,)}, report


def ways_of(report: Report) -> set[tuple[str | None, ...]]:
    return {layer.strategy for layer in report.plan.layers if ATTENTION in layer.name}


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("way", ["ring", "q", "k"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_split_sequence_is_serial(ranks: int, way: str, causal: bool) -> None:
    report = proved(Net(causal=causal), ranks, pins=pinned(way))
    assert report.passed and ways_of(report) == {(way,)}, report


@pytest.mark.parametrize(
    "ways",
    [
        ["b0", "ring"],
        ["ring", "b0"],
        ["ring", "ring"],
        ["q", "ring"],
        ["ring", "b1"],
        ["q", "k"],
        ["k", "b1"],
    ],
)
def test_a_ring_goes_with_other_splits(ways: list[str]) -> None:
    report = proved(Net(causal=True), 4, mesh=Mesh((2, 2)), pins=pinned(*ways))
    assert report.passed and ways_of(report) == {tuple(ways)}, report


def test_keys_of_a_ring_are_not_split_once_more() -> None:
    with pytest.raises(InputError, match="ring"):
        proved(Net(causal=True), 4, mesh=Mesh((2, 2)), pins=pinned("ring", "k"))


def test_a_ring_goes_with_stages_and_recomputing() -> None:
    pins = pinned("ring")
    report = proved(Net(causal=True), 2, pins=pins, recompute=Recompute.ALL)
    assert report.passed, report
    report = proved(Net(causal=True), 4, pins=pins, pipeline_ranks=2, micro_batches=2)
    assert report.passed and report.plan.pipeline.ranks == 2, report


def test_keys_of_attention_with_dropout_are_gathered() -> None:
    with pytest.raises(InputError, match="ring"):
        proved(Net(causal=True, dropout=0.2), 2, pins=pinned("ring"))


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_moves_no_earlier_ones(causal: bool) -> None:
    """Without a reference: the blocks that a rank computes are those of its own rows."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))

    def out(key: Tensor) -> Tensor:
        parts = (
            ROWS(query[:, :, a:b], key, value, None, a, 0, None, 0 if causal else None, 0.5)
            for a, b in ((0, 4), (4, 9))
        )
        return torch.cat(list(parts), 2)

    other = key.clone()
    other[:, :, 6] += 1
    moved = (out(key) != out(other)).any(-1).any(1).flatten().tolist()
    assert moved == [row >= 6 or not causal for row in range(9)]


def test_a_token_moves_no_other_document() -> None:
    """Nor any earlier row of its own."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 13, 4, dtype=torch.float64) for _ in range(3))
    mask, token = shown(2, 13), 5

    def out(key: Tensor) -> Tensor:
        parts = (
            ROWS(query[:, :, a:b], key, value, mask[:, :, a:b], a, 0, None, None, 0.5)
            for a, b in ((0, 6), (6, 13))
        )
        return torch.cat(list(parts), 2)

    other = key.clone()
    other[:, :, token] += 1
    moved = (out(key) != out(other)).any(-1).any(1).any(0).flatten().tolist()
    assert moved == [row // 4 == token // 4 and row >= token for row in range(13)]
