"""Ranges of rows of one dim, and the check that a tensor has as many as its operator was told."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from autopar.errors import CheckError

Rows: TypeAlias = tuple[int, int]  # [first, stop)


def overlap(one: Rows, other: Rows) -> Rows:
    """The rows in both; empty ones begin where the later one does."""
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def expect(x: Tensor, dim: int, length: int) -> None:
    """A slice or a copy of a wrong length could pass in silence; torch would even broadcast a 1."""
    if x.shape[dim] != length:
        raise CheckError(
            where=f"a move of the tensor {tuple(x.shape)}",
            found=f"dim {dim} of length {x.shape[dim]}",
            wanted=f"{length} on this rank, by the sizes or rows in the move's arguments",
            remedy="take both from the same cut",
        )
