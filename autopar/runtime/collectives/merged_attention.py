"""Attention whose keys and values alone are split over the ranks of a group: their results are merged.

The operator is `torch.ops.autopar.merged_attention`. Each rank computes all queries with its own keys, and

    L = log sum_ranks exp L_i        out = sum_ranks exp(L_i - L) out_i

by a maximum and one sum of all ranks' numbers. Backward needs no other rank: with the merged out and L each
rank finds its keys' gradients, and its share of the queries'.

`first` is the place of the rank's first query, `start` that of its first key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.core.operator_facts import declare
from autopar.runtime import registry
from autopar.runtime.collectives import groups, transport
from autopar.trace.attention.row_attention import OPERANDS, ROWS, row_scratch, save, shape_of, slopes_by


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, group: str, *how: Any
) -> tuple[Tensor, Tensor]:
    rows = torch.ops.autopar_attention.row_attention_forward.default
    out, lse = rows(query, key, value, mask, *how)
    top = lse.clone()
    transport.all_reduce(top, groups.group(group), dist.ReduceOp.MAX)
    top.masked_fill_(top == -math.inf, 0.0)
    weight = (lse - top).exp_().unsqueeze(-1)
    shares = torch.cat([out * weight, weight], -1)  # in the log-sum-exp's dtype
    transport.all_reduce(shares, groups.group(group))
    *_, total = shares.split([value.shape[-1], 1], -1)
    merged = shares[..., :-1] / total.masked_fill(total == 0, 1.0)
    return merged.to(query.dtype).contiguous(), total.log().squeeze(-1).add_(top).contiguous()


def _differentiate(ctx: Any, gradient: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    backward = torch.ops.autopar_attention.row_attention_backward.default
    return slopes_by(backward, ctx, gradient, skipped=1)  # the group


def _merged_attention(*arguments: Any) -> Tensor:
    out: Tensor = registry.operator("merged_attention_forward")(*arguments)[0]
    return out


_HOW = "str group, int first, int start, int? before, int? after, float scale"
registry.functional(
    "merged_attention_forward",
    f"({OPERANDS}, {_HOW}) -> (Tensor, Tensor)",
    _forward,
    shape=shape_of,
    setup=save,
    backward=_differentiate,
)
registry.composite("merged_attention", f"({OPERANDS}, {_HOW}) -> Tensor", _merged_attention)


def merged_bytes(query: Any, value: Any) -> tuple[int, int]:
    """Bytes of which ranks find the maximum, and that they add up."""
    rows = math.prod(query.shape[:-1]) * max(4, query.dtype.itemsize)
    return rows, rows * (value.shape[-1] + 1)


def _own_keys(args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The rank's own queries and keys."""
    return ROWS, (*args[:4], *args[5:])


def _scratch(args: Sequence[Any]) -> tuple[int, int]:
    """Bytes beside operands and results: the ranks' shares, before and after their sum."""
    forward, backward = row_scratch((*args[:4], *args[5:]))
    return forward + 2 * merged_bytes(args[0], args[2])[1], backward


declare(registry.operator("merged_attention"), local_form=_own_keys, scratch=_scratch)
