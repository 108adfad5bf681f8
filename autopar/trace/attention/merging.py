"""Blocks of one attention, added up.

Of two sets of keys with log-sum-exps L1 and L2

    L = log(exp L1 + exp L2)        out = exp(L1 - L) out1 + exp(L2 - L) out2

Autograd can't be asked for this: kernels give no gradient of L. Backward goes through the blocks once more.
Sums are taken in float32, of float64 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.score_blocks import ScoreBlock, Span
from autopar.trace.attention.block_kernels import attend, slope_of_bias, slopes
from autopar.trace.attention.row_masks import RowMask, part_of, wide

MOST_SCORES = 1 << 26  # numbers of scores that are written out at once


def rows_of(x: Tensor, span: Span, first: int) -> Tensor:
    """The rows of [start, stop) of a tensor whose row 0 is row `first`."""
    return x.narrow(-2, span[0] - first, span[1] - span[0])


class MergedAttention:
    """The out and log-sum-exp of queries, the first of which is row `first`, over the blocks added so far;
    values have `width` columns."""

    def __init__(
        self, query: Tensor, width: int, *, first: int, scale: float, mask: RowMask | None = None
    ) -> None:
        self.query, self.first, self.scale, self.mask = query, first, scale, mask
        self.shape = *query.shape[:-1], width
        self.out: Tensor | None = None
        self.lse = query.new_full(query.shape[:-1], -math.inf, dtype=wide(query.dtype))

    def add(self, blocks: Iterable[ScoreBlock], key: Tensor, value: Tensor, start: int) -> None:
        """Add blocks of keys and values, the first of which is row `start`."""
        for block in _written_apart(blocks, self.query, self.mask is not None and not key.is_cpu):
            q = rows_of(self.query, block.rows, self.first)
            k, v = (rows_of(x, block.keys, start) for x in (key, value))
            bias = None if self.mask is None else self.mask.bias(block)
            how = _shape(block, bias)
            out, lse = attend(q, k, v, scale=self.scale, **how)
            lse = lse.to(self.lse.dtype)
            if self.mask is not None and bias is not None:
                lse = self.mask.weighed(block, bias, lse)
            self._merge(block.rows, out, lse)

    def _merge(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        if self.out is None and out.shape == self.shape:  # all rows: nothing came before
            self.out, self.lse = out, lse
            return
        if self.out is None:
            self.out = out.new_zeros(self.shape, dtype=self.lse.dtype)
        self.out = self.out.to(self.lse.dtype)
        before = self.lse.narrow(-1, rows[0] - self.first, rows[1] - rows[0])
        total = torch.logaddexp(before, lse)
        mine, over = rows_of(self.out, rows, self.first), total.masked_fill(total == -math.inf, 0.0)
        mine.mul_((before - over).exp_().unsqueeze(-1))
        mine.addcmul_(out.to(mine.dtype), (lse - over).exp_().unsqueeze(-1))
        before.copy_(total)

    def result(self) -> tuple[Tensor, Tensor]:
        """The out in the queries' dtype, 0 of a row that has seen no key, and the log-sum-exp."""
        out = self.query.new_zeros(self.shape) if self.out is None else self.out
        return out.to(self.query.dtype).contiguous(), self.lse.contiguous()


class MergedSlopes:
    """The gradient of queries, the first of which is row `first`, over the blocks added so far; and of a mask
    that `learns`."""

    def __init__(
        self,
        gradient: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        first: int,
        scale: float,
        mask: RowMask | None = None,
        learns: bool = False,
    ) -> None:
        self.of_rows = gradient, query, out
        self.lse, self.first, self.scale, self.mask = lse, first, scale, mask
        self.total = query.new_zeros(query.shape, dtype=wide(query.dtype))
        self.of_mask = mask.mask.new_zeros(mask.mask.shape, dtype=mask.dtype) if mask and learns else None

    def add(
        self, blocks: Iterable[ScoreBlock], key: Tensor, value: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        """Add blocks of keys and values, the first of which is row `start`; gives these' gradients."""
        of_key, of_value = (x.new_zeros(x.shape, dtype=self.total.dtype) for x in (key, value))
        written = self.mask is not None and (self.of_mask is not None or not key.is_cpu)
        for block in _written_apart(blocks, self.of_rows[1], written):
            gradient, q, out = (rows_of(x, block.rows, self.first) for x in self.of_rows)
            lse = self.lse.narrow(-1, block.rows[0] - self.first, block.rows[1] - block.rows[0])
            k, v = (rows_of(x, block.keys, start) for x in (key, value))
            bias = None if self.mask is None else self.mask.bias(block)
            if self.mask is not None and bias is not None:
                learns = self.of_mask is not None
                gradient, lse = self.mask.for_kernel(block, gradient, lse, learns=learns)
                self._learn(block, (gradient, q, k, v, out, lse, bias))
            how = _shape(block, bias)
            found = slopes(gradient, q, k, v, out, lse, scale=self.scale, **how)
            spans = (block.rows, self.first), (block.keys, start), (block.keys, start)
            for total, slope, span in zip((self.total, of_key, of_value), found, spans, strict=True):
                rows_of(total, *span).add_(slope)
        return of_key, of_value

    def _learn(self, block: ScoreBlock, given: tuple[Tensor, ...]) -> None:
        """Add the gradient of the block's part of a mask that learns."""
        if self.of_mask is not None:
            slope = slope_of_bias(*given, scale=self.scale)
            part = part_of(part_of(self.of_mask, -2, block.rows, self.first), -1, block.keys, 0)
            part.add_(slope.sum_to_size(part.shape))


def _written_apart(blocks: Iterable[ScoreBlock], query: Tensor, written: bool) -> Iterator[ScoreBlock]:
    """Blocks of few rows where their scores are `written` out."""
    for block in blocks:
        (first, stop), keys = block.rows, block.keys[1] - block.keys[0]
        rows = max(1, MOST_SCORES // (math.prod(query.shape[:-2]) * keys)) if written else stop - first
        yield from (replace(block, rows=(at, min(at + rows, stop))) for at in range(first, stop, rows))


def _shape(block: ScoreBlock, bias: Tensor | None) -> dict[str, Any]:
    """How kernels take a block: its bias, if there is one, says what a triangle hides."""
    if bias is not None:
        return {"triangle": False, "bias": bias}
    return {"triangle": block.triangle, "turned": block.turned}


def heads_second(x: Tensor) -> Tensor:
    """A view as kernels take it, (batch, heads, rows, columns), whose columns lie one after the other."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4) if x.dim() > 4 else x
