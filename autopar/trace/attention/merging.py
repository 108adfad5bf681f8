"""Blocks of one attention, added up.

Of two sets of keys with log-sum-exps L1 and L2

    L = log(exp L1 + exp L2)        out = exp(L1 - L) out1 + exp(L2 - L) out2

Autograd can't be asked for this: kernels give no gradient of L. Backward goes through the blocks once more.
Sums are taken in float32, of float64 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from autopar.core.score_blocks import ScoreBlock, Span
from autopar.trace.attention.block_kernels import attend, slopes


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks add up."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def rows_of(x: Tensor, span: Span, first: int) -> Tensor:
    """The rows of [start, stop) of a tensor whose row 0 is row `first`."""
    return x.narrow(-2, span[0] - first, span[1] - span[0])


class MergedAttention:
    """The out and log-sum-exp of queries, the first of which is row `first`, over the blocks added so far;
    values have `width` columns."""

    def __init__(self, query: Tensor, width: int, *, first: int, scale: float) -> None:
        self.query, self.first, self.scale = query, first, scale
        self.shape = *query.shape[:-1], width
        self.out: Tensor | None = None
        self.lse = query.new_full(query.shape[:-1], -math.inf, dtype=wide(query.dtype))

    def add(self, blocks: Iterable[ScoreBlock], key: Tensor, value: Tensor, start: int) -> None:
        """Add blocks of keys and values, the first of which is row `start`."""
        for block in blocks:
            q = rows_of(self.query, block.rows, self.first)
            k, v = (rows_of(x, block.keys, start) for x in (key, value))
            out, lse = attend(q, k, v, triangle=block.triangle, turned=block.turned, scale=self.scale)
            self._merge(block.rows, out, lse.to(self.lse.dtype))

    def _merge(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        if self.out is None and out.shape == self.shape:  # all rows: nothing came before
            self.out, self.lse = out, lse
            return
        if self.out is None:
            self.out = out.new_zeros(self.shape, dtype=self.lse.dtype)
        self.out = self.out.to(self.lse.dtype)
        before = self.lse.narrow(-1, rows[0] - self.first, rows[1] - rows[0])
        total = torch.logaddexp(before, lse)
        mine = rows_of(self.out, rows, self.first)
        mine.mul_((before - total).exp_().unsqueeze(-1))
        mine.addcmul_(out.to(mine.dtype), (lse - total).exp_().unsqueeze(-1))
        before.copy_(total)

    def result(self) -> tuple[Tensor, Tensor]:
        """The out in the queries' dtype, 0 of a row that has seen no key, and the log-sum-exp."""
        out = self.query.new_zeros(self.shape) if self.out is None else self.out
        return out.to(self.query.dtype).contiguous(), self.lse.contiguous()


class MergedSlopes:
    """The gradient of queries, the first of which is row `first`, over the blocks added so far."""

    def __init__(
        self, gradient: Tensor, query: Tensor, out: Tensor, lse: Tensor, *, first: int, scale: float
    ) -> None:
        self.of_rows = gradient, query, out
        self.lse, self.first, self.scale = lse, first, scale
        self.total = query.new_zeros(query.shape, dtype=wide(query.dtype))

    def add(
        self, blocks: Iterable[ScoreBlock], key: Tensor, value: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        """Add blocks of keys and values, the first of which is row `start`; gives these' gradients."""
        of_key, of_value = (x.new_zeros(x.shape, dtype=self.total.dtype) for x in (key, value))
        for block in blocks:
            gradient, q, out = (rows_of(x, block.rows, self.first) for x in self.of_rows)
            lse = self.lse.narrow(-1, block.rows[0] - self.first, block.rows[1] - block.rows[0])
            k, v = (rows_of(x, block.keys, start) for x in (key, value))
            how = {"triangle": block.triangle, "turned": block.turned}
            found = slopes(gradient, q, k, v, out, lse, **how, scale=self.scale)
            spans = (block.rows, self.first), (block.keys, start), (block.keys, start)
            for total, slope, span in zip((self.total, of_key, of_value), found, spans, strict=True):
                rows_of(total, *span).add_(slope)
        return of_key, of_value


def heads_second(x: Tensor) -> Tensor:
    """A view as kernels take it, (batch, heads, rows, columns), whose columns lie one after the other."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4) if x.dim() > 4 else x
