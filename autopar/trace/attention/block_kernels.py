"""One block of attention, (batch, heads, rows, columns), with the log-sum-exp of its scores.

    S = q k^T scale        L = log sum_keys exp S        P = exp(S - L)        out = P v

Backward takes the out and L of *all* blocks of a row, g its gradient, and gives this block's share:

    dv = P^T g        dS = P (g v^T - sum_columns g out)        dq = dS k scale        dk = dS^T q scale

By torch's fused kernels on CPUs and, of 16-bit numbers, on GPUs; elsewhere as written here. Grouped queries
share their keys' head. Kernels want heads of one size: the smaller ones end in zeros, which changes nothing;
and triangles whose later keys are hidden: rows and keys of others are reversed.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Slopes: TypeAlias = tuple[Tensor, Tensor, Tensor]  # of query, key and value
_HALVES = (torch.float16, torch.bfloat16)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    triangle: bool,
    scale: float,
    turned: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The out and log-sum-exp of a block; of a `triangle`, a square, row r sees the keys [0, r], or if it is
    `turned` those from r on. A `bias` is added to the scores of a block that is whole."""
    width = v.shape[-1]
    q, k, v = _of_one_width(*_upright(turned, q, k, v))
    if q.is_cpu:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        found = kernel(q, k, v, 0.0, triangle, attn_mask=bias, scale=scale)
    elif q.dtype in _HALVES and bias is None:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, triangle, scale=scale)
    else:
        scores = _scores(q, k, triangle, scale, bias)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        found = weights.to(v.dtype) @ _each_head(v, q), lse
    (out,) = _upright(turned, found[0][..., :width])
    return out, found[1].flip(-1) if turned else found[1]


def slopes(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    triangle: bool,
    scale: float,
    turned: bool = False,
    bias: Tensor | None = None,
) -> Slopes:
    """The block's share of the gradients of query, key and value."""
    widths = [x.shape[-1] for x in (q, k, v)]
    gradient, out, q, k, v = _of_one_width(*_upright(turned, gradient, out, q, k, v))
    lse = lse.flip(-1) if turned else lse
    if q.is_cpu:
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = back(gradient, q, k, v, out, lse, 0.0, triangle, attn_mask=bias, scale=scale)
    elif q.dtype in _HALVES and bias is None:
        back, rows, keys = aten._scaled_dot_product_flash_attention_backward, q.shape[-2], k.shape[-2]
        seed = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, of which there is none
        how = None, None, rows, keys, 0.0, triangle, seed, seed
        found = back(gradient, q, k, v, out, lse, *how, scale=scale)
    else:
        weights, of_scores = _slopes_of_scores(gradient, q, k, v, out, lse, (triangle, scale, bias))
        of_scores, weights = (of_scores * scale).to(q.dtype), weights.to(q.dtype)
        shares = _by_head(of_scores.mT @ q, k), _by_head(weights.mT @ gradient, v)
        found = of_scores @ _each_head(k, q), *shares
    one, two, three = (slope[..., :width] for slope, width in zip(found, widths, strict=True))
    one, two, three = _upright(turned, one, two, three)
    return one, two, three


def slope_of_bias(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, *, scale: float
) -> Tensor:
    """The gradient of what is added to the scores of a block, which no kernel gives."""
    slope = _slopes_of_scores(gradient, q, k, v, out, lse, (False, scale, bias))[1]
    return slope.sum_to_size(bias.shape)


def _slopes_of_scores(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """P and dS."""
    weights = (_scores(q, k, *how) - lse.unsqueeze(-1)).exp()
    total = (gradient * out).sum(-1, keepdim=True)
    return weights, weights * (gradient @ _each_head(v, q).mT - total)


def _upright(turned: bool, *tensors: Tensor) -> list[Tensor]:
    """Rows in the order in which later keys are hidden: of a turned triangle the last row comes first."""
    return [x.flip(-2) for x in tensors] if turned else list(tensors)


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _scores(q: Tensor, k: Tensor, triangle: bool, scale: float, bias: Tensor | None) -> Tensor:
    scores = q @ _each_head(k, q).mT * scale
    scores = scores if bias is None else scores + bias
    if not triangle:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -math.inf)


def _each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of the queries."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _by_head(slope: Tensor, x: Tensor) -> Tensor:
    """The sum of a gradient over the queries' heads that share one of `x`."""
    summed: Tensor = slope.unflatten(1, (x.shape[1], -1)).sum(2)
    return summed
