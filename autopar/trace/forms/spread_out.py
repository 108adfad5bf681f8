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
from autopar.core.operator_facts import facts_of

CONTIGUOUS = torch.contiguous_format


def spreads_out(node: fx.Node, target: Any) -> bool:
    """Whether the operator of `node` copies its expanded first operand, to give it another shape or order."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not facts_of(target).copies_expanded:
        return False
    return _is_expanded(source.meta.get("val")) and not _is_expanded(node.meta.get("val"))


def is_spread_out(item: Operator) -> bool:
    """Whether an operator copies an expanded operand into contiguous memory."""
    return facts_of(item.target).is_identity and item.kwargs.get("memory_format") is CONTIGUOUS


def _is_expanded(given: Any) -> bool:
    """Whether elements of a tensor share their memory, as a view of an expanded tensor's do."""
    if not isinstance(given, Tensor) or given.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(given.shape, given.stride(), strict=True))
