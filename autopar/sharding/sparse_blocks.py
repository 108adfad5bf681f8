"""The block of a sparse matrix that one rank multiplies by, in the two forms that its kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SparseBlock:
    """Entries of a sparse block by rows, and the same ones by columns: `order` says which they are.

    Indices are short where they can be, as kernels want them; those of `order` are long, as torch's are.
    """

    crow: Tensor
    column: Tensor
    crow_transposed: Tensor
    row: Tensor
    order: Tensor

    @property
    def forms(self) -> tuple[Tensor, ...]:
        """All of it, as the kernel takes it."""
        return self.crow, self.column, self.crow_transposed, self.row, self.order


def block_of(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> SparseBlock:
    """The forms of a block whose entries are in the order of rows."""
    order, dtype = torch.argsort(columns, stable=True), index_dtype(len(rows), *shape)
    return SparseBlock(
        _starts(rows, shape[0]).to(dtype),
        columns.to(dtype).contiguous(),
        _starts(columns, shape[1]).to(dtype),
        rows.to(dtype)[order],
        order,
    )


def index_dtype(*counts: int) -> torch.dtype:
    """The shortest integers that number as many entries, rows or columns."""
    return torch.int32 if max(counts) <= torch.iinfo(torch.int32).max else torch.int64


def _starts(rows: Tensor, length: int) -> Tensor:
    starts = torch.zeros(length + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(rows, minlength=length), 0, out=starts[1:])
    return starts
