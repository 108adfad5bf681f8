"""One placement change of one tensor, on one axis or, a sum, alike on several. A move *is* a collective, a
slice, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.placement import Layout, Placement, show


@dataclass(frozen=True, slots=True)
class Move:
    """One change of placement: layouts `source` and `target` differ on `axis` alone.

    A sum over ranks may be one over several axes. Then the layouts differ alike on each, of which `axis` is
    the first.
    """

    axis: int
    source: Layout
    target: Layout

    @property
    def placements(self) -> tuple[Placement, Placement]:
        return self.source[self.axis], self.target[self.axis]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes on which the layouts differ."""
        pairs = enumerate(zip(self.source, self.target, strict=True))
        return tuple(axis for axis, (before, after) in pairs if before != after)

    def __str__(self) -> str:
        return f"{show(self.source)} -> {show(self.target)}"
