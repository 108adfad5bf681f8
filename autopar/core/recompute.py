"""How much of the forward pass may be recomputed in backward."""

from __future__ import annotations

from enum import Enum

Segment = tuple[int, int]  # operators [first, stop) of a graph, by number


class Recompute(Enum):
    """Nothing, all parts, or whatever is fastest under the memory cap."""

    NONE = "none"
    ALL = "all"
    AUTO = "auto"
