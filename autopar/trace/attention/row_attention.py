"""Attention of rows that begin anywhere with keys that begin anywhere, on one rank.

A rank's rows [first, first + rows) of attention under a band, causal or a window, whose keys are whole, see
as many keys as their positions say: rectangles and triangles (`autopar.core.score_blocks`). A mask of these
would be rows x keys numbers: of 131,072 tokens over 8 ranks 2 GB as bytes. Any other mask is an operand, of
these rows and all keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import declare
from autopar.core.score_blocks import Band, ScoreBlock, score_blocks
from autopar.core.work import Flops, FusedScores, SizedCall
from autopar.trace.attention.merging import MergedAttention, MergedSlopes, heads_second
from autopar.trace.attention.row_masks import RowMask, by_head, wide

NAMESPACE = "autopar_attention"  # no collectives: those are autopar's own
aten = torch.ops.aten
_custom_op: Any = torch.library.custom_op  # ships with types of its own arguments alone
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")


def blocks_of(
    query: Tensor | TensorSpec, key: Tensor | TensorSpec, first: int, start: int, band: Band
) -> Iterator[ScoreBlock]:
    """The blocks of queries from row `first` and keys from row `start`."""
    rows, keys = (first, first + query.shape[-2]), (start, start + key.shape[-2])
    return score_blocks(rows, keys, band)


def row_mask(mask: Tensor | None, query: Tensor, first: int, band: Band) -> RowMask | None:
    """The mask of queries from row `first`."""
    return None if mask is None else RowMask(by_head(mask, query), first, query.dtype, band)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    first: int,
    start: int,
    before: int | None,
    after: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = map(heads_second, (query, key, value))
    band = Band(before, after)
    seen = row_mask(mask, query, first, band)
    merged = MergedAttention(q, v.shape[-1], first=first, scale=scale, mask=seen)
    merged.add(blocks_of(q, k, first, start, band), k, v, start)
    out, lse = merged.result()
    return out.view(*query.shape[:-1], -1), lse.view(query.shape[:-1])


def _run_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    learns: bool,
    first: int,
    start: int,
    before: int | None,
    after: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g, q, k, v, y = map(heads_second, (gradient, query, key, value, out))
    band = Band(before, after)
    how = {"mask": row_mask(mask, query, first, band), "learns": learns}
    merged = MergedSlopes(g, q, y, lse.view(q.shape[:-1]), first=first, scale=scale, **how)  # type: ignore[arg-type]
    of_keys = merged.add(blocks_of(q, k, first, start, band), k, v, start)
    return given_back(merged, of_keys, (query, key, value), mask)


def given_back(
    merged: MergedSlopes, of_keys: Sequence[Tensor], operands: Sequence[Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, and of a mask that learns; no numbers for another."""
    one, two, three = (
        slope.to(x.dtype).view(x.shape) for slope, x in zip((merged.total, *of_keys), operands, strict=True)
    )
    if merged.of_mask is None or mask is None:
        return one, two, three, one.new_empty(0)
    lead = operands[0].shape[:-2] if operands[0].dim() > 4 else merged.of_mask.shape[:-2]
    of_mask = merged.of_mask.view(*lead, *merged.of_mask.shape[-2:])
    return one, two, three, of_mask.sum_to_size(mask.shape).to(mask.dtype)


def shape_of(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The out, and the log-sum-exp of each row."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


def backward_shape(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    learns: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, and of a mask that learns."""
    one, two, three = (x.new_empty(x.shape) for x in (query, key, value))
    return one, two, three, query.new_empty(0) if mask is None or not learns else mask.new_empty(mask.shape)


OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? mask"
SLOPES = "(Tensor, Tensor, Tensor, Tensor)"
_HOW = "int first, int start, int? before, int? after, float scale"
_forward = _custom_op(
    f"{NAMESPACE}::row_attention_forward",
    _run,
    mutates_args=(),
    schema=f"({OPERANDS}, {_HOW}) -> (Tensor, Tensor)",
)
_backward = _custom_op(
    f"{NAMESPACE}::row_attention_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor gradient, {OPERANDS}, Tensor out, Tensor lse, bool learns, {_HOW}) -> {SLOPES}",
)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what backward takes."""
    query, key, value, mask, *ctx.arguments = inputs
    ctx.save_for_backward(query, key, value, mask, *output)
    ctx.mark_non_differentiable(output[1])


def slopes_by(backward: Any, ctx: Any, gradient: Tensor, *, skipped: int = 0) -> tuple[Tensor | None, ...]:
    """What `backward` gives of what was saved; it takes no arguments that are `skipped`."""
    learns = ctx.needs_input_grad[3]
    *found, of_mask = backward(gradient, *ctx.saved_tensors, learns, *ctx.arguments[skipped:])
    return (*found, of_mask if learns else None, *(None for _ in ctx.arguments))


def _differentiate(ctx: Any, gradient: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    return slopes_by(torch.ops.autopar_attention.row_attention_backward.default, ctx, gradient)


_forward.register_fake(shape_of)
_backward.register_fake(backward_shape)
_forward.register_autograd(_differentiate, setup_context=save)
_library.define(f"row_attention({OPERANDS}, {_HOW}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl(
    "row_attention",
    lambda *args: torch.ops.autopar_attention.row_attention_forward.default(*args)[0],
    "CompositeImplicitAutograd",
)
ROWS: Any = torch.ops.autopar_attention.row_attention.default


def is_in_blocks(given: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> bool:
    """Whether blocks of an attention's scores can be computed apart and merged: of floats, without dropout,
    where queries, keys and values are of the same samples, and heads but for grouped queries'."""
    query, key, value = (specs[given[name].name] for name in ("query", "key", "value"))
    last = -3 if is_grouped(given, specs) else -2
    leads = {spec.shape[:last] for spec in (query, key, value)}
    plain = not given.get("dropout_p") and query.dtype.is_floating_point and 0 not in key.shape
    return plain and len(leads) == 1 and len(query.shape) > 2


def is_grouped(given: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> bool:
    """Whether several query heads share a key head."""
    query, key = (specs[given[name].name].shape for name in ("query", "key"))
    return bool(given.get("enable_gqa", "before" in given)) and query[-3] != key[-3]


def plain_calls(
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    mask: TensorSpec | None,
    blocks: Sequence[ScoreBlock],
) -> Iterator[Call]:
    """The calls of torch's attention that cost what the blocks do."""
    grouped = {"enable_gqa": True} if query.shape[-3:-2] != key.shape[-3:-2] else {}
    for block in blocks:
        rows, keys = (stop - start for start, stop in (block.rows, block.keys))
        args: tuple[Any, ...] = tuple(
            replace(spec, shape=(*spec.shape[:-2], length, spec.shape[-1]))
            for spec, length in zip((query, key, value), (rows, keys, keys), strict=True)
        )
        if mask is not None:
            last = (min(rows, mask.shape[-2]), min(keys, mask.shape[-1]))
            args = (*args, replace(mask, shape=(*mask.shape[:-2], *last)))
        elif block.triangle:
            args = (*args, None, 0.0, True)
        yield Call(aten.scaled_dot_product_attention.default, args, grouped)


def _within(args: Sequence[Any]) -> tuple[Call, ...]:
    query, key, value, mask, first, start, *band, _ = args
    return tuple(plain_calls(query, key, value, mask, list(blocks_of(query, key, first, start, Band(*band)))))


def row_bytes(*specs: TensorSpec) -> int:
    """Bytes of one row of each."""
    return sum(spec.nbytes // max(1, spec.shape[-2]) for spec in specs)


def block_scratch(query: TensorSpec, key: TensorSpec, value: TensorSpec, rows: int) -> tuple[int, int]:
    """Bytes that blocks of at most so many keys need beside results, each way.

    They are a block's own out, or gradients, and sums in as many bits as they are taken in.
    """
    wider = wide(query.dtype).itemsize // query.dtype.itemsize
    out, block = query.nbytes // query.shape[-1] * value.shape[-1], rows * row_bytes(key, value)
    sums = wider * (query.nbytes + key.nbytes + value.nbytes) if wider > 1 else 0
    return out * (1 + 2 * wider if wider > 1 else 1), query.nbytes + block + sums


def row_scratch(args: Sequence[Any]) -> tuple[int, int]:
    """Bytes that `row_attention` needs beside operands and results, each way."""
    query, key, value, mask, first, start, *band, _ = args
    blocks = list(blocks_of(query, key, first, start, Band(*band)))
    most = max((block.keys[1] - block.keys[0] for block in blocks), default=0)
    forward, backward = block_scratch(query, key, value, most)
    bias = bias_bytes(query, mask, most)
    return (forward if len(blocks) > 1 else 0) + bias, backward + bias


def bias_bytes(query: TensorSpec, mask: TensorSpec | None, keys: int) -> int:
    """Bytes of what a mask adds to the scores of a block of so many keys."""
    if mask is None:
        return 0
    return math.prod(mask.shape[:-1]) * min(keys, mask.shape[-1]) * wide(query.dtype).itemsize


def _seen(call: SizedCall) -> int:
    """Number of scores in each head."""
    q, k = call.operands[:2]
    _, _, _, _, first, start, *band, _ = call.call.args
    return sum(block.scores for block in blocks_of(q, k, first, start, Band(*band)))


def _flops(call: SizedCall) -> Flops:
    q, k, v = call.operands[:3]
    scores = 2 * _seen(call) * math.prod(q.shape[:-2])
    e, d = q.shape[-1], v.shape[-1]
    trained = any(spec.requires_grad for spec in (q, k, v))
    return Flops(scores * (e + d), scores * (3 * e + 2 * d) if trained else 0)


def _scores(call: SizedCall) -> FusedScores:
    q, _, v = call.operands[:3]
    rows, width = q.shape[-2:]
    keys = -(-_seen(call) // max(1, rows))  # as many as a row sees
    return FusedScores(math.prod(q.shape[:-2]), rows, keys, width, v.shape[-1])


declare(ROWS, flops=_flops, products=_scores, within=_within, scratch=row_scratch)
