"""How large a rank's part of a tensor is, for many layouts at once.

    layouts           R R    R S0   S0 R   S0 S0   S0 S1      all of some placements on each axis
    axes with S0       -      2      1      1, 2    1         the rest follows from these

Whether a shard exists, and how long its longest part is, depends on the axes that have it, not on what the
others have. So both are asked for once for each shard and set of axes, and layouts are looked up.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from autopar.core.placement import Layout, Placement, R, Shard
from autopar.sharding.atoms import Dims


class LocalSizes:
    """All layouts of some placements on each axis, in the order of their product."""

    def __init__(self, placements: tuple[tuple[Placement, ...], ...]) -> None:
        self.layouts: tuple[Layout, ...] = tuple(itertools.product(*placements))
        self.count = len(placements)
        digits = np.indices(tuple(map(len, placements))).reshape(self.count, -1)
        self.axes: dict[Shard, NDArray[np.intp]] = {}  # that have a shard in each layout, a bit for each
        for axis, choices in enumerate(placements):
            for place, shard in enumerate(choices):
                if isinstance(shard, Shard):
                    bits = (digits[axis] == place) * (1 << axis)
                    self.axes[shard] = self.axes.get(shard, np.zeros_like(bits)) + bits

    def legal(self, dims: Dims, name: str) -> NDArray[np.bool_]:
        """Flags of layouts that are legal for a tensor."""
        found = np.ones(len(self.layouts), dtype=np.bool_)
        for shard, axes in self.axes.items():
            found &= np.array([dims.legal(name, each) for each in self._alone(shard)])[axes]
        return found

    def nbytes(self, dims: Dims, name: str, numbers: NDArray[np.intp]) -> NDArray[np.intp]:
        """Bytes of the largest rank's part of a tensor in the layouts of these numbers, all legal."""
        spec = dims.graph.specs[name]
        found = np.full(len(numbers), spec.numel, dtype=np.intp)
        for shard, axes in self.axes.items():
            own, layouts = axes[numbers], self._alone(shard)
            if not own.any():
                continue
            length = dims.atoms.of[name][shard.dim][shard.atom]
            rows = np.full(len(layouts), length)
            for each in set(own.tolist()) - {0}:
                start, stop = dims.rows(name, shard, layouts[each], dims.largest(name, layouts[each]))
                rows[each] = stop - start
            found = found // length * rows[own]
        return found * spec.dtype.itemsize

    def _alone(self, shard: Shard) -> list[Layout]:
        """For each set of axes, by its bits, the layout that has the shard there and nothing elsewhere."""
        return [
            tuple(shard if axes & (1 << axis) else R for axis in range(self.count))
            for axes in range(1 << self.count)
        ]
