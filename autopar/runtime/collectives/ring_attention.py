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

Causal as drawn the last rank has most to do, and the others wait. So rank r and its mirror, rank n - 1 - r,
first swap their later halves, where steps are shorter then: of equal parts each has as much to do in each.

    halves     own     after the swap       each with       k0 k7    k2 k5    k4 k3    k6 k1
    rank 0     0 1     0 7                                  2        2        2        2      halves' scores
    rank 1     2 3     2 5
    rank 2     4 5     4 3
    rank 3     6 7     6 1

`place` is the rank's own in the group, `starts` and `stops` say which rows of the queries each rank has, and
`owned` is the cut of the keys.

Sources: Liu, Zaharia and Abbeel, 2023; Brandon et al., 2023, on work in equal parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
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
    is_mirrored: bool = False  # whether ranks swap their later halves first

    @staticmethod
    def of(cuts: Sequence[Any], mask: object) -> Ring:
        """The ring of an operator's arguments from `starts` to `after`, and its mask."""
        starts, stops, owned, *band = cuts
        return _balanced(tuple(starts), tuple(stops), tuple(owned), *band, mask is None)

    @property
    def band(self) -> Band:
        return Band(self.before, self.after)

    @property
    def longest(self) -> int:
        """The scores of the rank with most to do in each step, of all steps."""
        places = range(len(self.starts))
        return sum(
            max(sum(block.scores for block in self.blocks(place, step)) for place in places)
            for step in places
        )

    def mirror(self, place: int) -> int:
        """The place with which a rank swaps."""
        return len(self.starts) - 1 - place

    def owner(self, place: int, step: int) -> int:
        """The place whose keys the rank takes in a step."""
        return (place - step) % len(self.starts)

    def rows(self, place: int) -> tuple[Span, ...]:
        """The rank's queries."""
        own = self.starts[place], self.stops[place]
        if not self.is_mirrored:
            return (own,)
        other = self.mirror(place)
        return (own[0], self.middle(place)), (self.middle(other), self.stops[other])

    def middle(self, place: int) -> int:
        """The first row of a rank's later half."""
        return (self.starts[place] + self.stops[place]) // 2

    def owned_keys(self, owner: int) -> tuple[Span, ...]:
        """The keys that a rank sends to others."""
        return self.rows(owner) if self.is_mirrored else ((self.owned[owner], self.owned[owner + 1]),)

    def keys(self, place: int, owner: int) -> tuple[Span, ...]:
        """The owner's keys that some of the rank's queries see."""
        return tuple(self._seen(place, own) for own in self.owned_keys(owner))

    def _seen(self, place: int, own: Span) -> Span:
        spans = [self.band.seen(rows, own) for rows in self.rows(place)]
        found = [span for span in spans if span[0] < span[1]] or spans[:1]
        return min(start for start, _ in found), max(stop for _, stop in found)

    def blocks(self, place: int, step: int) -> Iterator[ScoreBlock]:
        """The scores that the rank computes in a step."""
        for rows in self.rows(place):
            for keys in self.keys(place, self.owner(place, step)):
                yield from score_blocks(rows, keys, self.band)


@lru_cache(256)
def _balanced(
    starts: tuple[int, ...],
    stops: tuple[int, ...],
    owned: tuple[int, ...],
    before: int | None,
    after: int | None,
    may_swap: bool,
) -> Ring:
    """The ring in which the slowest ranks have less to do; halves are swapped where keys lie as rows do."""
    ring = Ring(starts, stops, owned, before, after)
    if not may_swap or owned != (*starts, stops[-1]):
        return ring
    return min((ring, replace(ring, is_mirrored=True)), key=lambda each: each.longest)


@dataclass(frozen=True, slots=True)
class _Mirror:
    """Swaps the later halves of a rank's rows with its mirror's, where a ring asks for that."""

    ring: Ring
    place: int
    group: str

    def enter(self, *whole: Tensor) -> list[tuple[Tensor, ...]]:
        """The rows [..., rows, columns] with which the rank computes, of tensors of its own rows."""
        if not self.ring.is_mirrored:
            return [(x,) for x in whole]
        half = self.ring.middle(self.place) - self.ring.starts[self.place]
        start, stop = self.ring.rows(self.place)[1]
        come = self._swapped([x[..., half:, :] for x in whole], stop - start)
        return [(x[..., :half, :], later) for x, later in zip(whole, come, strict=True)]

    def leave(self, *pieces: tuple[Tensor, ...]) -> list[Tensor]:
        """Tensors of the rank's own rows, of those with which it has computed."""
        if not self.ring.is_mirrored:
            return [x for (x,) in pieces]
        rows = self.ring.stops[self.place] - self.ring.middle(self.place)
        come = self._swapped([later for _, later in pieces], rows)
        return [torch.cat([first, later], -2) for (first, _), later in zip(pieces, come, strict=True)]

    def _swapped(self, halves: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        peer = self.ring.mirror(self.place)
        if peer == self.place:
            return halves
        slots = [x.new_empty((*x.shape[:-2], rows, x.shape[-1])) for x in halves]
        sends, receives = ([(peer, x) for x in each] for each in (halves, slots))
        transport.start(sends, receives, self.group).wait()
        return slots


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What travels between one rank and the others; `own` are the keys and values that this rank sends."""

    ring: Ring
    place: int
    group: str
    own: Sequence[Pair]

    @property
    def steps(self) -> int:
        return len(self.ring.starts)

    def taker(self, step: int) -> int:
        """The place that takes this rank's keys in a step."""
        return (self.place + step) % self.steps

    def empty(self, spans: Sequence[Span], dtype: torch.dtype) -> list[Pair]:
        made = []
        for (start, stop), pair in zip(spans, self.own, strict=True):
            one, two = (x.new_empty((*x.shape[:-2], stop - start, x.shape[-1]), dtype=dtype) for x in pair)
            made.append((one, two))
        return made

    def seen(self, pairs: Sequence[Pair], step: int) -> list[Pair]:
        """The rows of the own keys and values, or of what is of their shape, that the step's taker sees:
        views."""
        found = []
        spans = self.ring.keys(self.taker(step), self.place)
        for span, pair, own in zip(spans, pairs, self.ring.owned_keys(self.place), strict=True):
            one, two = (rows_of(x, span, own[0]) for x in pair)
            found.append((one, two))
        return found

    def start_keys(self, step: int) -> tuple[list[Pair], transport.Transfer]:
        """Begin to fetch the keys and values of a step."""
        owner, taker = self.ring.owner(self.place, step), self.taker(step)
        slots = self.empty(self.ring.keys(self.place, owner), self.own[0][0].dtype)
        sent = [(taker, x) for pair in self.seen(self.own, step) for x in pair]
        return slots, transport.start(sent, [(owner, slot) for pair in slots for slot in pair], self.group)

    def start_slopes(self, step: int, slopes: Sequence[Pair]) -> tuple[list[Pair], transport.Transfer]:
        """Begin to send gradients of a step's keys to their owner, and to fetch those of the own keys."""
        owner, taker, dtype = self.ring.owner(self.place, step), self.taker(step), self.own[0][0].dtype
        slots = self.empty(self.ring.keys(taker, self.place), dtype)
        sent = [(owner, slope.to(dtype)) for pair in slopes for slope in pair]
        return slots, transport.start(sent, [(taker, slot) for pair in slots for slot in pair], self.group)

    def pairs(self) -> Iterator[tuple[int, list[Pair]]]:
        """Each step with its keys and values; the next ones are under way meanwhile."""
        pairs = self.seen(self.own, 0)
        for step in range(self.steps):
            after = self.start_keys(step + 1) if step + 1 < self.steps else None
            yield step, pairs
            if after is not None:
                pairs, under_way = after
                under_way.wait()

    def spans(self, step: int) -> tuple[Span, ...]:
        """The rows of a step's keys."""
        return self.ring.keys(self.place, self.ring.owner(self.place, step))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, group: str, place: int, *how: Any
) -> tuple[Tensor, Tensor]:
    *cuts, scale = how
    ring = Ring.of(cuts, mask)
    mirror, width = _Mirror(ring, place, group), value.shape[-1]
    queries, keys, values = mirror.enter(*map(heads_second, (query, key, value)))
    at = _Exchange(ring, place, group, list(zip(keys, values, strict=True)))
    seen = row_mask(mask, query, ring.starts[place], ring.band)
    merged = [
        MergedAttention(q, width, first=rows[0], scale=scale, mask=seen)
        for rows, q in zip(ring.rows(place), queries, strict=True)
    ]
    for step, pairs in at.pairs():
        for rows, each in zip(ring.rows(place), merged, strict=True):
            for span, pair in zip(at.spans(step), pairs, strict=True):
                each.add(score_blocks(rows, span, ring.band), *pair, span[0])
    del keys, values, at, pairs
    outs, sums = zip(*(each.result() for each in merged), strict=True)
    out, lse = mirror.leave(outs, tuple(x.unsqueeze(-1) for x in sums))
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
    group: str,
    place: int,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *cuts, scale = how
    ring = Ring.of(cuts, mask)
    mirror = _Mirror(ring, place, group)
    given = (
        *map(heads_second, (gradient, query, out, key, value)),
        lse.view(_rows_of_heads(query)).unsqueeze(-1),
    )
    *of_rows, keys, values, sums = mirror.enter(*given)
    at = _Exchange(ring, place, group, list(zip(keys, values, strict=True)))
    seen = row_mask(mask, query, ring.starts[place], ring.band)
    merged = [
        MergedSlopes(g, q, y, total.squeeze(-1), first=rows[0], scale=scale, mask=seen, learns=learns)
        for rows, g, q, y, total in zip(ring.rows(place), *of_rows, sums, strict=True)
    ]
    own = at.empty(ring.owned_keys(place), merged[0].total.dtype)
    for total in itertools.chain.from_iterable(own):
        total.zero_()
    under_way: tuple[int, list[Pair], transport.Transfer] | None = None
    for step, pairs in at.pairs():
        slopes = [
            _slopes(ring, place, merged, pair, span) for span, pair in zip(at.spans(step), pairs, strict=True)
        ]
        _arrive(at, under_way, own)
        if step:
            under_way = step, *at.start_slopes(step, slopes)
        else:
            under_way = None
            _add(at, 0, slopes, own)
    _arrive(at, under_way, own)
    totals = tuple(each.total.to(query.dtype) for each in merged)
    merged[0].total, *of_keys = mirror.leave(
        totals, *(tuple(x.to(key.dtype) for x in each) for each in zip(*own, strict=True))
    )
    return given_back(merged[0], of_keys, (query, key, value), mask)


def _rows_of_heads(query: Tensor) -> torch.Size:
    return heads_second(query).shape[:-1]


def _slopes(ring: Ring, place: int, merged: Sequence[MergedSlopes], pair: Pair, span: Span) -> Pair:
    """The gradients of keys and values that all of a rank's queries give."""
    first, *others = (
        each.add(score_blocks(rows, span, ring.band), *pair, span[0])
        for rows, each in zip(ring.rows(place), merged, strict=True)
    )
    for slopes in others:
        for total, slope in zip(first, slopes, strict=True):
            total.add_(slope)
    return first


def _arrive(
    at: _Exchange, under_way: tuple[int, list[Pair], transport.Transfer] | None, own: Sequence[Pair]
) -> None:
    """Wait for a step's gradients of the own keys, and add them up."""
    if under_way is not None:
        step, slots, moving = under_way
        moving.wait()
        _add(at, step, slots, own)


def _add(at: _Exchange, step: int, slopes: Sequence[Pair], own: Sequence[Pair]) -> None:
    """Add the gradients of the own keys that a step's taker sees."""
    for totals, pair in zip(at.seen(own, step), slopes, strict=True):
        for total, slope in zip(totals, pair, strict=True):
            total.add_(slope)


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
    the gradients of a part, those that leave and those that arrive; and halves that are swapped."""
    query, key, value, mask, _, place, *how, _ = args
    ring = Ring.of(how, mask)
    own, *taken = (
        sum(stop - start for start, stop in ring.keys(place, ring.owner(place, step)))
        for step in range(len(ring.starts))
    )
    rows, wider = max(taken, default=0), wide(query.dtype).itemsize // query.dtype.itemsize
    forward, backward = block_scratch(query, key, value, max(own, rows))
    pair, bias = row_bytes(key, value), bias_bytes(query, mask, max(own, rows))
    parts = min(2, len(taken)) * rows * pair
    given, back = swapped_bytes(ring, place, query, key, value)
    if ring.is_mirrored:  # blocks are of halves; results come when the steps' parts are gone
        forward, backward = forward // 2, backward // 2
    totals = query.nbytes + key.nbytes + value.nbytes
    steps = 2 * parts + wider * max(own, rows) * pair + backward + bias
    return (
        given[0] + max(parts + forward + bias, back[0]),
        given[1] + (max(steps, totals + back[1]) if ring.is_mirrored else steps),
    )


def swapped_bytes(
    ring: Ring, place: int, query: TensorSpec, key: TensorSpec, value: TensorSpec
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes of halves that come from a rank's mirror, each way: its rows, and results of its own ones."""
    if not ring.is_mirrored:
        return (0, 0), (0, 0)
    start, stop = ring.rows(place)[1]
    there, back = stop - start, ring.stops[place] - ring.middle(place)
    operands = row_bytes(query, key, value)
    out = row_bytes(query) // query.shape[-1] * value.shape[-1]
    sums = row_bytes(query) // query.dtype.itemsize // query.shape[-1] * wide(query.dtype).itemsize
    return (there * operands, there * (operands + 2 * out + sums)), (back * (out + sums), back * operands)


declare(registry.operator("ring_attention"), local_form=_own_block, scratch=_scratch)
