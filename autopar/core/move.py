"""One placement change of one tensor on one axis. A move *is* a collective, a slice, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.placement import Layout, Placement, show


@dataclass(frozen=True, slots=True)
class Move:
    """One change of placement: layouts `source` and `target` differ on `axis` alone."""

    axis: int
    source: Layout
    target: Layout

    @property
    def placements(self) -> tuple[Placement, Placement]:
        return self.source[self.axis], self.target[self.axis]

    def __str__(self) -> str:
        return f"{show(self.source)} -> {show(self.target)}"
