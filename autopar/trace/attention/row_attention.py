"""Attention of rows that begin anywhere with keys that begin anywhere, on one rank and without a mask.

A rank's rows [first, first + rows) of attention under a band, causal or a window, whose keys are whole, see
as many keys as their positions say: rectangles and triangles (`autopar.core.score_blocks`). A mask of these
would be rows x keys numbers: of 131,072 tokens over 8 ranks 2 GB as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import declare
from autopar.core.score_blocks import Band, ScoreBlock, score_blocks
from autopar.core.work import Flops, FusedScores, SizedCall
from autopar.trace.attention.merging import MergedAttention, MergedSlopes, heads_second, wide

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


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    start: int,
    before: int | None,
    after: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = map(heads_second, (query, key, value))
    merged = MergedAttention(q, v.shape[-1], first=first, scale=scale)
    merged.add(blocks_of(q, k, first, start, Band(before, after)), k, v, start)
    out, lse = merged.result()
    return out.view(*query.shape[:-1], -1), lse.view(query.shape[:-1])


def _run_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    first: int,
    start: int,
    before: int | None,
    after: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    g, q, k, v, y = map(heads_second, (gradient, query, key, value, out))
    merged = MergedSlopes(g, q, y, lse.view(q.shape[:-1]), first=first, scale=scale)
    found = merged.total, *merged.add(blocks_of(q, k, first, start, Band(before, after)), k, v, start)
    one, two, three = (
        slope.to(x.dtype).view(x.shape) for slope, x in zip(found, (query, key, value), strict=True)
    )
    return one, two, three


def shape_of(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The out, and the log-sum-exp of each row."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


def backward_shape(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    one, two, three = (x.new_empty(x.shape) for x in (query, key, value))
    return one, two, three


_HOW = "int first, int start, int? before, int? after, float scale"
_forward = _custom_op(
    f"{NAMESPACE}::rows_forward",
    _run,
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_HOW}) -> (Tensor, Tensor)",
)
_backward = _custom_op(
    f"{NAMESPACE}::rows_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, {_HOW})"
    " -> (Tensor, Tensor, Tensor)",
)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what backward takes."""
    query, key, value, *ctx.arguments = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    found = torch.ops.autopar_attention.rows_backward.default(gradient, *ctx.saved_tensors, *ctx.arguments)
    return (*found, *(None for _ in ctx.arguments))


_forward.register_fake(shape_of)
_backward.register_fake(backward_shape)
_forward.register_autograd(_differentiate, setup_context=save)
_library.define(
    f"rows(Tensor query, Tensor key, Tensor value, {_HOW}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl(
    "rows",
    lambda *args: torch.ops.autopar_attention.rows_forward.default(*args)[0],
    "CompositeImplicitAutograd",
)
ROWS: Any = torch.ops.autopar_attention.rows.default


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
    query: TensorSpec, key: TensorSpec, value: TensorSpec, blocks: Sequence[ScoreBlock]
) -> Iterator[Call]:
    """The calls of torch's attention that cost what the blocks do."""
    grouped = {"enable_gqa": True} if query.shape[-3:-2] != key.shape[-3:-2] else {}
    for block in blocks:
        sized = (
            TensorSpec((*spec.shape[:-2], stop - start, spec.shape[-1]), spec.dtype, spec.requires_grad)
            for spec, (start, stop) in zip(
                (query, key, value), (block.rows, block.keys, block.keys), strict=True
            )
        )
        args = (*sized, None, 0.0, True) if block.triangle else tuple(sized)
        yield Call(aten.scaled_dot_product_attention.default, args, grouped)


def _within(args: Sequence[Any]) -> tuple[Call, ...]:
    query, key, value, first, start, *band, _ = args
    return tuple(plain_calls(query, key, value, list(blocks_of(query, key, first, start, Band(*band)))))


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


def _scratch(args: Sequence[Any]) -> tuple[int, int]:
    query, key, value, first, start, *band, _ = args
    blocks = list(blocks_of(query, key, first, start, Band(*band)))
    forward, backward = block_scratch(
        query, key, value, max((block.keys[1] - block.keys[0] for block in blocks), default=0)
    )
    return (forward if len(blocks) > 1 else 0), backward


def _seen(call: SizedCall) -> int:
    """Number of scores in each head."""
    q, k = call.operands[:2]
    _, _, _, first, start, *band, _ = call.call.args
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


declare(ROWS, flops=_flops, products=_scores, within=_within, scratch=_scratch)
