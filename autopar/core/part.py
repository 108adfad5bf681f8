"""One rank's part of a full tensor: a box in the space of the tensor's atoms.

qkv weight, 3 x 4 heads x 8, sharded by heads on 2 ranks: rank 1 owns rows [2, 4) of the heads

    full dim  (3, 4, 8)       box  [0:3, 2:4, 0:8]      local dim 3 * 2 * 8 = 48
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """For each dim its atoms, and for each atom the rows [start, stop) that the rank owns."""

    atoms: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape."""
        return tuple(math.prod(stop - start for start, stop in dim) for dim in self.rows)

    @property
    def is_whole(self) -> bool:
        return all(
            (start, stop) == (0, size)
            for sizes, dim in zip(self.atoms, self.rows, strict=True)
            for size, (start, stop) in zip(sizes, dim, strict=True)
        )

    def span(self, dim: int) -> range:
        """The smallest range of `dim`'s rows that covers the rank's."""
        rows = self.indices(dim)
        return range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0)

    def lies_in(self, dim: int, rows: range) -> bool:
        """Whether the rank's rows of `dim` are exactly `rows`."""
        mine = self.indices(dim)
        return len(mine) == len(rows) and torch.equal(mine, torch.arange(rows.start, rows.stop))

    def within(self, rows: range) -> Part | None:
        """The part within a tensor that holds only `rows` of dim 0, which must cover it; None if the part's
        rows are no block."""
        span = self.span(0)
        if len(span) != self.shape[0]:
            return None
        first = span.start - rows.start
        return Part(((len(rows),), *self.atoms[1:]), (((first, first + len(span)),), *self.rows[1:]))

    def indices(self, dim: int) -> Tensor:
        """The rows of `dim` that the rank owns, ascending."""
        rows = torch.arange(math.prod(self.atoms[dim]))
        return Part((self.atoms[dim],), (self.rows[dim],)).take(rows)

    def take(self, full: Tensor) -> Tensor:
        """The rank's part of `full`, a copy unless it is everything."""
        return full if self.is_whole else self._box(full).reshape(self.shape)

    def add(self, local: Tensor, full: Tensor) -> None:
        """Add the rank's part into `full` in place; `full` must be contiguous."""
        box = self._box(full)
        box += local.reshape(box.shape)

    def put(self, local: Tensor, full: Tensor) -> None:
        """Write the rank's part into `full` in place; `full` must be contiguous."""
        box = self._box(full)
        box.copy_(local.reshape(box.shape))

    def _box(self, full: Tensor) -> Tensor:
        opened = full.reshape(tuple(itertools.chain.from_iterable(self.atoms)))
        for dim, (start, stop) in enumerate(itertools.chain.from_iterable(self.rows)):
            opened = opened.narrow(dim, start, stop - start)
        return opened


def whole(shape: Sequence[int]) -> Part:
    """All of a tensor."""
    return Part(tuple((size,) for size in shape), tuple(((0, size),) for size in shape))
