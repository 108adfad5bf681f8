"""Moments of a tensor whose normalised dims are sharded.

Two passes, the mean first, so that nothing cancels:

    mean = 1/N sum_ranks sum_local x          var = 1/N sum_ranks sum_local (x - mean)^2

with N the true global count. Both sums are taken P -> B: every rank uses them for its own shard,
so their gradients are unsummed and are summed on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.sharding.rule import Handle, Site

aten = torch.ops.aten


def mean(site: Site, value: Handle, dims: Sequence[int], count: int, axes: Sequence[int]) -> Handle:
    """The mean over `dims` (kept, of length 1) of all ranks along `axes`; `count` is global."""
    total = site.call(aten.sum.dim_IntList, value, list(dims), True)
    total = site.reduce(total, axes, target=torch.ops.autopar.p_to_b.default)
    return site.call(aten.div.Scalar, total, count)


def normalise(
    site: Site,
    value: Handle,
    dims: Sequence[int],
    *,
    count: int,
    axes: Sequence[int],
    eps: float,
    centred: bool,
) -> Handle:
    """(x - mean) / sqrt(var + eps) over `dims`; not `centred`, x / sqrt(mean square + eps)."""
    if centred:
        value = site.call(aten.sub.Tensor, value, mean(site, value, dims, count, axes))
    square = mean(site, site.call(aten.mul.Tensor, value, value), dims, count, axes)
    return site.call(
        aten.mul.Tensor, value, site.call(aten.rsqrt.default, site.call(aten.add.Scalar, square, eps))
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which fused kernels accumulate: float32 for 16-bit values."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cast(site: Site, value: Handle, before: torch.dtype, after: torch.dtype) -> Handle:
    """A value of dtype `before` as `after`; nothing if they are equal."""
    return value if before == after else site.call(aten.to.dtype, value, after)


def widened(site: Site, value: Handle) -> Handle:
    """A value of operand 0's dtype, wide enough to accumulate."""
    return cast(site, value, site.spec().dtype, wide(site.spec().dtype))


def narrowed(site: Site, value: Handle) -> Handle:
    """A widened value back in operand 0's dtype."""
    return cast(site, value, wide(site.spec().dtype), site.spec().dtype)


def affine(site: Site, value: Handle, weight: Handle | None, bias: Handle | None) -> Handle:
    """Scale and shift: value * weight + bias, both shaped to broadcast."""
    if weight is not None:
        value = site.call(aten.mul.Tensor, value, weight)
    return value if bias is None else site.call(aten.add.Tensor, value, bias)
