"""Copies of expanded tensors: what a reshape makes of a few rows takes the memory of all of them.

    k            2 heads                 k[:, :, None].expand(.., 2, 4, ..)    still 2 heads' memory
    reshape      8 heads, each its own   clone, then a view of it

A graph has no copies that only make tensors contiguous, for those cost little beside what made them. That of
an expanded tensor is many times what it is made of, so it stands in the graph as an operator, and counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.graph import Operator

aten = torch.ops.aten
_SHAPES = {aten.reshape.default, aten.view.default, aten.flatten.using_ints, aten.unflatten.int}
CONTIGUOUS = torch.contiguous_format


def spreads_out(node: fx.Node, target: Any) -> bool:
    """Whether the operator of `node` copies its expanded first operand, to give it another shape or order."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not (target in _SHAPES or target is aten.contiguous.default):
        return False
    given, made = source.meta.get("val"), node.meta.get("val")
    if not isinstance(given, Tensor) or not isinstance(made, Tensor) or not _is_expanded(given):
        return False
    return target is aten.contiguous.default or not _is_view(given, made)


def is_spread_out(item: Operator) -> bool:
    """Whether an operator is such a copy."""
    return item.target is aten.clone.default and item.kwargs.get("memory_format") is CONTIGUOUS


def _is_expanded(given: Tensor) -> bool:
    pairs = zip(given.shape, given.stride(), strict=True)
    return given.layout is torch.strided and any(size > 1 and stride == 0 for size, stride in pairs)


def _is_view(given: Tensor, made: Tensor) -> bool:
    """Whether a tensor of the second's shape can lie in the memory of the first."""
    try:
        torch.empty_strided(given.shape, given.stride(), device="meta").view(made.shape)
    except RuntimeError:
        return False
    return True
