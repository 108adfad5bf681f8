"""The block of a sparse matrix that one rank multiplies by, in the two forms that its kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """Entries of a sparse block by rows, and the same ones by columns: `order` says which they are."""

    crow: Tensor
    column: Tensor
    crow_transposed: Tensor
    row: Tensor
    order: Tensor

    @property
    def forms(self) -> tuple[Tensor, ...]:
        """All of it, as the kernel takes it."""
        return self.crow, self.column, self.crow_transposed, self.row, self.order


def block_of(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Block:
    """The forms of a block whose entries are in the order of rows."""
    order = torch.argsort(columns, stable=True)
    return Block(
        _starts(rows, shape[0]),
        columns.contiguous(),
        _starts(columns, shape[1]),
        rows[order].contiguous(),
        order,
    )


def _starts(rows: Tensor, length: int) -> Tensor:
    starts = torch.zeros(length + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(rows, minlength=length), 0, out=starts[1:])
    return starts
