"""Attention whose keys and values are split over the ranks of a group, as its queries are: ring attention.

The operator is `torch.ops.autopar.ring_attention`. In step s each rank computes the scores of its queries
with the keys of the rank s places before it, while those of the next step travel:

    step       0      1      2      3             causal
    rank 0    k0     k3     k2     k1             k0   .    .    .
    rank 1    k1     k0     k3     k2             k1   k0   .    .
    rank 2    k2     k1     k0     k3             k2   k1   k0   .
    rank 3    k3     k2     k1     k0             k3   k2   k1   k0

Keys go straight from the rank that owns them, not through all ranks between, so keys that a rank's rows don't
see don't travel to it: under a window a halo alone does, the last keys of the rank before. Results are merged
by their log-sum-exps. Backward does the same once more, and gradients of a step's keys go back to their
owner, which adds them up: no rank holds more than two ranks' keys beside its own.

`place` is the rank's own in the group, `starts` and `stops` say which rows of the queries each rank has, and
`owned` is the cut of the keys.

Source: Liu, Zaharia and Abbeel, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.core.operator_facts import declare
from autopar.core.score_blocks import Band, ScoreBlock, Span, score_blocks
from autopar.runtime import registry
from autopar.runtime.collectives import transport
from autopar.trace.attention.merging import MergedAttention, MergedSlopes, heads_second, rows_of
from autopar.trace.attention.row_attention import (
    OPERANDS,
    ROWS,
    SLOPES,
    backward_shape,
    bias_bytes,
    block_scratch,
    given_back,
    row_bytes,
    row_mask,
    save,
    shape_of,
    slopes_by,
)
from autopar.trace.attention.row_masks import wide

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients


@dataclass(frozen=True, slots=True)
class Ring:
    """Who has which queries and keys, by place in the group, and who sees what of whom."""

    starts: Sequence[int]
    stops: Sequence[int]
    owned: Sequence[int]
    before: int | None
    after: int | None

    @property
    def band(self) -> Band:
        return Band(self.before, self.after)

    def owner(self, place: int, step: int) -> int:
        """The place whose keys the rank takes in a step."""
        return (place - step) % len(self.starts)

    def rows(self, place: int) -> Span:
        return self.starts[place], self.stops[place]

    def keys(self, place: int, owner: int) -> Span:
        """The owner's keys that some of the rank's queries see."""
        own = self.owned[owner], self.owned[owner + 1]
        return self.band.seen(self.rows(place), own)

    def blocks(self, place: int, step: int) -> Iterator[ScoreBlock]:
        """The scores that the rank computes in a step."""
        return score_blocks(self.rows(place), self.keys(place, self.owner(place, step)), self.band)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What travels between one rank and the others; keys and values are this rank's own."""

    ring: Ring
    place: int
    group: str
    own: Pair

    @property
    def steps(self) -> int:
        return len(self.ring.starts)

    def taker(self, step: int) -> int:
        """The place that takes this rank's keys in a step."""
        return (self.place + step) % self.steps

    def empty(self, span: Span, dtype: torch.dtype) -> Pair:
        one, two = (
            x.new_empty((*x.shape[:-2], span[1] - span[0], x.shape[-1]), dtype=dtype) for x in self.own
        )
        return one, two

    def given(self, step: int) -> Pair:
        """The own keys and values that the step's taker sees: views."""
        span = self.ring.keys(self.taker(step), self.place)
        one, two = (rows_of(x, span, self.ring.owned[self.place]) for x in self.own)
        return one, two

    def start_keys(self, step: int) -> tuple[Pair, transport.Transfer]:
        """Begin to fetch the keys and values of a step."""
        owner, taker = self.ring.owner(self.place, step), self.taker(step)
        slots = self.empty(self.ring.keys(self.place, owner), self.own[0].dtype)
        sent = [(taker, x) for x in self.given(step)]
        return slots, transport.start(sent, [(owner, slot) for slot in slots], self.group)

    def start_slopes(self, step: int, slopes: Pair) -> tuple[Pair, transport.Transfer]:
        """Begin to send gradients of a step's keys to their owner, and to fetch those of the own keys."""
        owner, taker = self.ring.owner(self.place, step), self.taker(step)
        slots = self.empty(self.ring.keys(taker, self.place), self.own[0].dtype)
        sent = [(owner, slope.to(self.own[0].dtype)) for slope in slopes]
        return slots, transport.start(sent, [(taker, slot) for slot in slots], self.group)

    def pairs(self) -> Iterator[tuple[int, Pair, int]]:
        """Each step with its keys and values, and the row with which these begin; the next ones are under way
        meanwhile."""
        pair = self.given(0)
        for step in range(self.steps):
            after = self.start_keys(step + 1) if step + 1 < self.steps else None
            yield step, pair, self.ring.keys(self.place, self.ring.owner(self.place, step))[0]
            if after is not None:
                pair, under_way = after
                under_way.wait()


def _exchange(key: Tensor, value: Tensor, group: str, place: int, *how: Any) -> tuple[_Exchange, float]:
    *ring, scale = how
    pair = heads_second(key), heads_second(value)
    return _Exchange(Ring(*ring), place, group, pair), scale


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor]:
    at, scale = _exchange(key, value, *how)
    q, width, first = heads_second(query), value.shape[-1], at.ring.starts[at.place]
    seen = row_mask(mask, query, first, at.ring.band)
    merged = MergedAttention(q, width, first=first, scale=scale, mask=seen)
    for step, pair, start in at.pairs():
        merged.add(at.ring.blocks(at.place, step), *pair, start)
    out, lse = merged.result()
    return out.view(*query.shape[:-1], width), lse.view(query.shape[:-1])


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    learns: bool,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    at, scale = _exchange(key, value, *how)
    g, q, y = map(heads_second, (gradient, query, out))
    first = at.ring.starts[at.place]
    seen = row_mask(mask, query, first, at.ring.band)
    lse = lse.view(q.shape[:-1])
    merged = MergedSlopes(g, q, y, lse, first=first, scale=scale, mask=seen, learns=learns)
    own = tuple(x.new_zeros(x.shape, dtype=merged.total.dtype) for x in at.own)
    under_way: tuple[int, Pair, transport.Transfer] | None = None
    for step, pair, start in at.pairs():
        slopes = merged.add(at.ring.blocks(at.place, step), *pair, start)
        _arrive(at, under_way, own)
        if step:
            under_way = step, *at.start_slopes(step, slopes)
        else:
            under_way = None
            _add(at, 0, slopes, own)
    _arrive(at, under_way, own)
    return given_back(merged, own, (query, key, value), mask)


def _arrive(
    at: _Exchange, under_way: tuple[int, Pair, transport.Transfer] | None, own: Sequence[Tensor]
) -> None:
    """Wait for a step's gradients of the own keys, and add them up."""
    if under_way is not None:
        step, slots, moving = under_way
        moving.wait()
        _add(at, step, slots, own)


def _add(at: _Exchange, step: int, slopes: Pair, own: Sequence[Tensor]) -> None:
    """Add the gradients of the own keys that a step's taker sees."""
    span = at.ring.keys(at.taker(step), at.place)
    for total, slope in zip(own, slopes, strict=True):
        rows_of(total, span, at.ring.owned[at.place]).add_(slope)


def _differentiate(ctx: Any, gradient: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    return slopes_by(registry.operator("ring_attention_backward"), ctx, gradient)


def _ring_attention(*arguments: Any) -> Tensor:
    out: Tensor = registry.operator("ring_attention_forward")(*arguments)[0]
    return out


_HOW = "str group, int place, int[] starts, int[] stops, int[] owned, int? before, int? after, float scale"
registry.functional(
    "ring_attention_forward",
    f"({OPERANDS}, {_HOW}) -> (Tensor, Tensor)",
    _forward,
    shape=shape_of,
    setup=save,
    backward=_differentiate,
)
registry.functional(
    "ring_attention_backward",
    f"(Tensor gradient, {OPERANDS}, Tensor out, Tensor lse, bool learns, {_HOW}) -> {SLOPES}",
    _backward,
    shape=backward_shape,
)
registry.composite("ring_attention", f"({OPERANDS}, {_HOW}) -> Tensor", _ring_attention)


def _own_block(args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The rank's queries with its own keys."""
    query, key, value, mask, _, place, starts, _, owned, *how = args
    return ROWS, (query, key, value, mask, starts[place], owned[place], *how)


def _scratch(args: Sequence[Any]) -> tuple[int, int]:
    """Bytes beside operands and results: parts of keys and values, of which one is under way, and in backward
    the gradients of a part, those that leave and those that arrive."""
    query, key, value, mask, _, place, *how, _ = args
    ring = Ring(*how)
    spans = [ring.keys(place, ring.owner(place, step)) for step in range(len(ring.starts))]
    own, *taken = (stop - start for start, stop in spans)
    rows, wider = max(taken, default=0), wide(query.dtype).itemsize // query.dtype.itemsize
    forward, backward = block_scratch(query, key, value, max(own, rows))
    pair, bias = row_bytes(key, value), bias_bytes(query, mask, max(own, rows))
    parts = min(2, len(taken)) * rows * pair
    return parts + forward + bias, 2 * parts + wider * max(own, rows) * pair + backward + bias


declare(registry.operator("ring_attention"), local_form=_own_block, scratch=_scratch)
