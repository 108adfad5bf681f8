"""How much of the forward pass may be recomputed in backward."""

from __future__ import annotations

from enum import Enum

Segment = tuple[int, int]  # operators [first, stop) of a graph, by number


class Recompute(Enum):
    """Parts to recompute: none, all, or those with the fastest step under the memory cap."""

    NONE = "none"
    ALL = "all"
    AUTO = "auto"
