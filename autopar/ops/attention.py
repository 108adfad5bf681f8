"""Scaled dot-product attention: batch, heads, query rows and value columns are free.

    "b h q e., b h k. e., b h k. v -> b h q v"       softmax(q kᵀ scale + mask) v

Keys are whole; or split as the queries are, *ring*, whose operator brings the parts together block by block
(`autopar.runtime.collectives.ring_attention`); or split alone, *k*, as where a few queries see many keys, and
results are merged (`autopar.runtime.collectives.merged_attention`). With grouped queries, heads =
(key heads, queries of each): sharded on the outer atom the keys go along, on the inner one every rank takes
all keys. Causal rows of a rank are a rectangle and a triangle of scores. With dropout, and where keys are of
fewer samples or heads, the mask of these rows is written out and keys stay whole; dropout is decomposed as
torch's own reference does, so that its mask can be the serial one, sliced.

Of s queries and t keys of size e, with values of size d, forward costs 2 b h s t (e + d) operations, and
backward, which computes the scores once more, 2 b h s t (3 e + 2 d). A causal mask saves fused kernels half.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.operator_facts import AttentionArguments, declare
from autopar.core.placement import B, Placement, R, Shard
from autopar.core.score_blocks import CAUSAL, EVERY_KEY, Band, score_blocks
from autopar.core.strategy import Option, Strategy
from autopar.core.work import Flops, FusedScores, SizedCall
from autopar.sharding.atoms import Atoms, Relation
from autopar.sharding.equation import Equation, Labels
from autopar.sharding.halo import place_along, places_along
from autopar.sharding.needed_rows import KEYS, RING
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.trace.attention.row_attention import ROWS, is_grouped, is_in_blocks

aten = torch.ops.aten
_KEYS = (1, 2)  # the operands key and value


@register
class Attention(Rule):
    """scaled_dot_product_attention over (..., heads, rows, columns)."""

    targets = (aten.scaled_dot_product_attention.default,)
    random = True

    def lead(self, op: Instance) -> list[str]:
        return [f"b{dim}" for dim in range(len(op.result_shape()) - 2)]

    def grouped(self, op: Instance) -> bool:
        """Whether several query heads share a key head."""
        return is_grouped(op.arguments, op.specs)

    def band(self, op: Instance) -> Band:
        """The keys that rows see, but for a mask."""
        return CAUSAL if op["is_causal"] else EVERY_KEY

    def equation(self, op: Instance) -> Equation:
        result, lead = op.result_shape(), self.lead(op)

        def labels(operand: int, row: str | None, column: str | None) -> Labels:
            names = [*lead, row, column]
            shape = op.shape(operand)
            first = len(names) - len(shape)
            return tuple(
                name if dim == len(names) - 1 or size == result[dim] else None
                for dim, (name, size) in enumerate(zip(names[first:], shape, strict=True), start=first)
            )

        operands = [labels(0, "q", None), labels(1, None, None), labels(2, None, "v")]
        if self.grouped(op):
            for index in _KEYS:
                operands[index] = tuple(None if label == lead[-1] else label for label in operands[index])
        if op.has("attn_mask"):
            operands.append(labels(3, "q", None))
        return Equation(tuple(operands), ((*lead, "q", "v"),), linear=(frozenset({2}),))

    def relations(self, op: Instance) -> list[Relation]:
        found = super().relations(op)
        if self.grouped(op):
            query, key, value = op.operands[:3]
            at, heads = len(op.shape(0)) - 3, op.shape(1)[-3]
            found.append(Relation(((query, at),), ((key, at), op.shape(0)[at] // heads)))
            found.append(Relation(((key, at),), ((value, at),)))
        if self.in_blocks(op):
            (key, key_rows), (value, value_rows) = ((op.operands[i], len(op.shape(i)) - 2) for i in _KEYS)
            found.append(Relation(((key, key_rows),), ((value, value_rows),)))
        return found

    def in_blocks(self, op: Instance) -> bool:
        """Whether blocks of its scores can be computed apart and merged."""
        return is_in_blocks(op.arguments, op.specs)

    def depth_of(self, op: Instance, equation: Equation, factor: str, atoms: Atoms) -> int:
        depth = super().depth_of(op, equation, factor, atoms)
        return min(depth, 1) if factor == "q" else depth  # a rank's rows are one range

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        found = [*super().options(op, atoms), *self.by_keys(op, atoms)]
        if not self.grouped(op):
            return found
        at, heads = len(op.shape(0)) - 3, self.lead(op)[-1]
        ours, theirs = atoms.of[op.operands[0]][at], atoms.of[op.operands[1]][at]
        kept: list[Option] = []
        for option in found:
            name, _, number = option.factor.partition(".")
            atom = int(number or 0)
            outer = ours[: atom + 1] == theirs[: atom + 1]
            if name != heads or math.prod(ours[:atom]) % op.shape(1)[at] == 0:
                kept.append(option)
            elif outer and atoms.of[op.operands[2]][at] == theirs:
                shard = Shard(at, atom)
                operands = (option.operands[0], shard, shard, *option.operands[3:])
                kept.append(Option(option.factor, operands, option.results))
        return kept

    def by_keys(self, op: Instance, atoms: Atoms) -> list[Option]:
        """Keys and values split along their rows, with queries or without."""
        rows = [len(op.shape(operand)) - 2 for operand in range(3)]
        cut = {atoms.of[op.operands[operand]][rows[operand]] for operand in _KEYS}
        if not self.in_blocks(op) or len(cut) > 1:
            return []
        query, *keys = map(Shard, rows)
        mask: list[Placement] = []
        if op.has("attn_mask"):
            labels = self.equation(op).operands[3]
            mask.append(Shard(labels.index("q")) if "q" in labels else B)
        return [
            Option(RING, (query, *keys, *mask), (query,)),
            Option(KEYS, (B, *keys, *[B for _ in mask]), (R,)),
        ]

    def fits(self, strategy: Strategy) -> bool:
        return not {RING, KEYS} <= {option.factor for option in strategy}  # of a ring all keys come by

    def lower(self, site: Site) -> Sequence[Any]:
        if site.axes(RING):
            return (self.by_ring(site),)
        if site.axes(KEYS):
            return (self.merged(site),)
        band = self.band(site)
        if band.hides and site.axes("q") and self.in_blocks(site):
            first, _ = self.rows_at(site, 0, site.coordinate)
            how = first, 0, band.before, band.after, self.scale(site)
            return (site.call(ROWS, *site.values, None, *how),)
        if float(site["dropout_p"]) > 0.0:
            return (self.with_dropout(site),)
        if site["is_causal"] and site.axes("q"):
            return (site.local_call(attn_mask=self.causal(site), is_causal=False),)
        return (site.local_call(),)

    def reads_position(self, op: Instance, factor: str) -> bool:
        return self.band(op).hides and factor in ("q", RING, KEYS)

    def scale(self, site: Site) -> float:
        return 1.0 / math.sqrt(site.shape(0)[-1]) if site["scale"] is None else float(site["scale"])

    def rows_at(self, site: Site, operand: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """The rows [start, stop) of queries or keys that a rank has."""
        name, dim, layout = site.operands[operand], len(site.shape(operand)) - 2, site.operand_layout(operand)
        if Shard(dim) not in layout:
            return 0, site.shape(operand)[dim]
        inner = math.prod(site.dims.atoms.of[name][dim][1:])
        start, stop = site.dims.rows(name, Shard(dim), layout, coordinate)
        return start * inner, stop * inner

    def by_ring(self, site: Site) -> Handle:
        axes = site.axes(RING)
        ranks = list(places_along(site, RING))
        starts, stops = (
            list(ends) for ends in zip(*(self.rows_at(site, 0, at) for at in ranks), strict=True)
        )
        owned = [0, *(self.rows_at(site, 1, at)[1] for at in ranks)]
        place = place_along(site, RING)
        band = self.band(site)
        how = site.key(axes), place, starts, stops, owned, band.before, band.after, self.scale(site)
        values = site.values if site.has("attn_mask") else [*site.values, None]
        shape = *site.emitter.shape(site.values[0])[:-1], site.emitter.shape(site.values[2])[-1]
        return site.emitter.collective(torch.ops.autopar.ring_attention.default, (*values, *how), shape)

    def merged(self, site: Site) -> Handle:
        values, band = site.values if site.has("attn_mask") else [*site.values, None], self.band(site)
        first, start = (self.rows_at(site, operand, site.coordinate)[0] for operand in (0, 1))
        how = site.key(site.axes(KEYS)), first, start, band.before, band.after, self.scale(site)
        shape = *site.emitter.shape(site.values[0])[:-1], site.emitter.shape(site.values[2])[-1]
        return site.emitter.collective(torch.ops.autopar.merged_attention.default, (*values, *how), shape)

    def is_uneven(self, op: Instance) -> bool:
        return self.band(op).hides

    def fullest(self, site: Site) -> tuple[int, ...]:
        """The rank whose rows see the most keys."""
        axes, band = site.sharding_axes("q", RING, KEYS), self.band(site)

        def scores(coordinate: tuple[int, ...]) -> int:
            keys = self.rows_at(site, 1, coordinate) if site.axes(KEYS) else (0, site.shape(1)[-2])
            blocks = score_blocks(self.rows_at(site, 0, coordinate), keys, band)
            return sum(block.scores for block in blocks)

        sizes = (range(size if axis in axes else 1) for axis, size in enumerate(site.mesh_shape))
        return max(itertools.product(*sizes), key=scores)

    def causal(self, site: Site) -> Handle:
        """Mask of keys that the rank's query rows see: those not after the row."""
        start, stop = self.rows_at(site, 0, site.coordinate)
        rows = site.draw(aten.arange.start, start, stop)
        keys = site.draw(aten.arange.start, 0, site.shape(1)[-2])
        return site.call(aten.ge.Tensor, site.call(aten.unsqueeze.default, rows, -1), keys)

    def with_dropout(self, site: Site) -> Handle:
        """softmax(q kᵀ scale + mask) · dropout mask, times v, step by step."""
        query, key, value = site.values[:3]
        if site["enable_gqa"]:
            repeats = site.emitter.shape(query)[-3] // site.emitter.shape(key)[-3]
            key = site.call(aten.repeat_interleave.self_int, key, repeats, -3)
            value = site.call(aten.repeat_interleave.self_int, value, repeats, -3)
        scores = site.call(aten.matmul.default, query, site.call(aten.transpose.int, key, -2, -1))
        scores = site.call(aten.mul.Scalar, scores, self.scale(site))
        if site["is_causal"]:
            hidden = site.call(aten.logical_not.default, self.causal(site))
            scores = site.call(aten.masked_fill.Scalar, scores, hidden, -math.inf)
        elif site.has("attn_mask") and site.spec(3).dtype == torch.bool:
            hidden = site.call(aten.logical_not.default, site.values[3])
            scores = site.call(aten.masked_fill.Scalar, scores, hidden, -math.inf)
        elif site.has("attn_mask"):
            scores = site.call(aten.add.Tensor, scores, site.values[3])
        weights = site.call(aten._safe_softmax.default, scores, -1)
        kept = self.dropout_mask(site, site.emitter.shape(weights))
        return site.call(aten.matmul.default, site.call(aten.mul.Tensor, weights, kept), value)

    def dropout_mask(self, site: Site, local: Sequence[int]) -> Handle:
        """The rank's part of the mask on [..., q, k]."""
        probability, dtype = float(site["dropout_p"]), site.spec().dtype
        axes = site.sharding_axes(*self.lead(site), "q")
        if not site.exact_random:
            index = 0
            for axis in axes:
                index = index * site.mesh.shape[axis] + site.coordinate[axis]
            return site.draw(torch.ops.autopar.shard_mask.default, list(local), probability, dtype, index)
        full = [*site.result_shape()[:-1], site.shape(1)[-2]]
        mask = site.draw(torch.ops.autopar.dropout_mask.default, full, probability, dtype)
        result = site.operator.results[0]
        assert result is not None
        return site.slice_to(mask, result, site.result_layout(), dims=range(len(full) - 1))

    def samples(self) -> Iterable[Sample]:
        def call(*args: Any, **kwargs: Any) -> Sample:
            return Sample(aten.scaled_dot_product_attention.default, args, kwargs)

        q, k, v = torch.randn(3, 5, 7, 4), torch.randn(3, 5, 6, 4), torch.randn(3, 5, 6, 3)
        seen = torch.rand(3, 1, 7, 6) > 0.3
        seen[..., 0] = True
        yield call(q, k, v)
        yield call(q, k, v, None, 0.0, True)
        yield call(q, k, v, seen)
        yield call(q, k, v, torch.randn(7, 6), scale=0.3)
        yield call(q, k, v, torch.randn(5, 1, 6))
        yield call(q[:, 0], k[:, 0], v[:, 0], None, 0.0, True)
        yield call(q, k, v, None, 0.3, True)
        yield call(q, k, v, seen, 0.3, scale=0.7)
        yield call(q[0], k[0], v[0], torch.randn(7, 6), 0.3)
        grouped = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
        yield call(*grouped, enable_gqa=True)
        yield call(*grouped, None, 0.3, True, enable_gqa=True)
        yield call(torch.randn(1, 4, 5, 4), torch.randn(1, 1, 7, 4), torch.randn(1, 1, 7, 4), enable_gqa=True)
        yield call(torch.randn(2, 8, 5, 4), torch.randn(2, 4, 5, 4), torch.randn(2, 4, 5, 4), enable_gqa=True)


@register
class BandedAttention(Attention):
    """Attention whose rows see the keys of a band: windows, of which no kernel of torch's knows."""

    targets = (ROWS,)
    random = False

    def band(self, op: Instance) -> Band:
        return Band(op["before"], op["after"])

    def lower(self, site: Site) -> Sequence[Any]:
        split = [site.axes(factor) for factor in ("q", RING, KEYS)]
        return super().lower(site) if any(split) else (site.local_call(),)

    def samples(self) -> Iterable[Sample]:
        q, k, v = torch.randn(3, 4, 7, 4), torch.randn(3, 4, 6, 4), torch.randn(3, 4, 6, 3)
        yield Sample(ROWS, (q, k, v, None, 0, 0, 2, 0, 0.5))
        yield Sample(ROWS, (q, k[:, :2], v[:, :2], None, 0, 0, 1, 2, 0.5))
        yield Sample(ROWS, (q[0], k[0], v[0], None, 0, 0, 3, None, 0.5))


_CAUSAL = 5  # the position of `is_causal`


def _flops(call: SizedCall) -> Flops:
    q, k, v = call.operands[:3]
    scores = 2 * q.numel // q.shape[-1] * k.shape[-2]
    e, d = q.shape[-1], v.shape[-1]
    trained = any(spec.requires_grad for spec in (q, k, v))
    return Flops(scores * (e + d), scores * (3 * e + 2 * d) if trained else 0)


def _scores(call: SizedCall) -> FusedScores:
    q, k, v = call.operands[:3]
    args, kwargs = call.call.args, call.call.kwargs
    causal = kwargs.get("is_causal", args[_CAUSAL] if len(args) > _CAUSAL else False)
    queries, width = q.shape[-2:]
    return FusedScores(
        heads=q.numel // (queries * width),
        queries=queries,
        keys=k.shape[-2],
        key=width,
        value=v.shape[-1],
        causal=bool(causal),
        masked=len(call.operands) > 3,
    )


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """GPUs draw attention's dropout in the fused kernel; CPUs fall back to saving the scores."""
    y: Tensor = aten.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, **options)
    return y


declare(aten.scaled_dot_product_attention, flops=_flops, products=_scores)
declare(aten.scaled_dot_product_attention, chooses_by_device=True, on_gpu=_fused)
declare(
    aten.scaled_dot_product_attention,
    attention=AttentionArguments("key", "value", "attn_mask", "is_causal", "dropout_p", "enable_gqa"),
)
