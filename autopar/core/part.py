"""One rank's part of a full tensor: a box in the space of the tensor's atoms.

qkv weight, 3 x 4 heads x 8, sharded by heads on 2 ranks: rank 1 owns rows [2, 4) of the heads

    full dim  (3, 4, 8)       box  [0:3, 2:4, 0:8]      local dim 3 * 2 * 8 = 48
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

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
