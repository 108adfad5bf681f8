"""The mask of some rows over all keys, block by block: truth values, or numbers that are added to scores.

Blocks are merged by their log-sum-exps L, which must tell them apart. Where a row's largest number is so low
that scores are rounded away beside it (a row that the least float hides as a whole), torch weighs the n keys
that have it alike. Such a row is *even*: a block's share is its number of these keys, and L is log n. In
backward P = exp(S - L) is 1 there, not 1 / n, as in torch's fused kernels, which lose log n. Torch doesn't
take these for a mask that learns: then the gradient of the row is divided by n.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.core.score_blocks import Band, ScoreBlock, Span


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks add up: float32, of float64 float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def part_of(x: Tensor, dim: int, span: Span, first: int) -> Tensor:
    """The elements [start, stop) along a dim whose element 0 is number `first`; all alike if it has one."""
    return x if x.shape[dim] == 1 else x.narrow(dim, span[0] - first, span[1] - span[0])


def by_head(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as kernels take it, (batch, heads, rows, keys), of queries of any dims before the last two."""
    lead = query.shape[:-2]
    if len(lead) > 2:
        mask = mask.expand(*lead, *mask.shape[-2:]).flatten(0, -4)
    return mask.view(*(1,) * (4 - mask.dim()), *mask.shape)


class RowMask:
    """The mask of rows, the first of which is row `first`, by heads; `dtype` is that of the queries. Truth
    values may hide scores beside those outside a band."""

    def __init__(self, mask: Tensor, first: int, dtype: torch.dtype, band: Band) -> None:
        self.mask, self.first, self.dtype, self.band = mask, first, wide(dtype), band
        self.is_truth = mask.dtype is torch.bool
        if not self.is_truth:
            self.top = mask.detach().amax(-1, keepdim=True).to(self.dtype)
            self.even = self.top.isfinite() & (self.top * torch.finfo(self.dtype).eps <= -1)

    def bias(self, block: ScoreBlock) -> Tensor:
        """What is added to a block's scores."""
        part = part_of(part_of(self.mask, -2, block.rows, self.first), -1, block.keys, 0)
        if self.is_truth:
            part = part & self._inside(block, part.device) if block.triangle else part
            return torch.zeros_like(part, dtype=self.dtype).masked_fill_(~part, -math.inf)
        return part.to(self.dtype)

    def weighed(self, block: ScoreBlock, bias: Tensor, lse: Tensor) -> Tensor:
        """A block's log-sum-exp, by which it is merged; kernels give 0 for rows that see nothing."""
        lse = lse.masked_fill(~(bias > -math.inf).any(-1), -math.inf)
        if self.is_truth:
            return lse
        count = (bias == self._rows(self.top, block)).expand(*bias.shape[:-1], _size(block.keys)).sum(-1)
        return torch.where(self._rows(self.even, block).squeeze(-1), count.to(lse.dtype).log(), lse)

    def for_kernel(
        self, block: ScoreBlock, gradient: Tensor, lse: Tensor, *, learns: bool
    ) -> tuple[Tensor, Tensor]:
        """The gradient and merged log-sum-exp with which a kernel's backward gives a block's share."""
        never = lse == -math.inf
        if not self.is_truth:
            even, top = (self._rows(x, block) for x in (self.even, self.top))
            if learns:
                gradient = torch.where(even, gradient / lse.exp().unsqueeze(-1), gradient).to(gradient.dtype)
            lse = torch.where(even.squeeze(-1), top.squeeze(-1), lse)
        return gradient, lse.masked_fill(never, math.inf)

    def _inside(self, block: ScoreBlock, device: torch.device) -> Tensor:
        """The scores of a block that lie in the band."""
        rows, keys = (torch.arange(*span, device=device) for span in (block.rows, block.keys))
        later = keys - rows.unsqueeze(-1)
        inside = torch.ones_like(later, dtype=torch.bool)
        inside = inside if self.band.after is None else inside & (later <= self.band.after)
        return inside if self.band.before is None else inside & (later >= -self.band.before)

    def _rows(self, x: Tensor, block: ScoreBlock) -> Tensor:
        return part_of(x, -2, block.rows, self.first)


def _size(span: Span) -> int:
    return span[1] - span[0]
