"""Whether a last product and its loss run in pieces of rows."""

from __future__ import annotations

from enum import Enum


class LossPieces(Enum):
    """Losses in pieces: none, all that can be, or all where a memory cap slows the step down without."""

    NONE = "none"
    ALL = "all"
    AUTO = "auto"
