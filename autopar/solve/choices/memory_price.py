"""What memory costs where no single row can state the cap: a Lagrange multiplier, seconds per byte."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """Seconds that a byte costs: of `state`, held all step long, and of what a micro-batch keeps."""

    state: float = 0.0
    saved: float = 0.0


FREE = MemoryPrice()
