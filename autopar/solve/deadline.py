"""By when a search is to be done, by the monotonic clock; None if it may take as long as it takes."""

from __future__ import annotations

import math
import time


def after(seconds: float | None) -> float | None:
    """The deadline in so many seconds."""
    return None if seconds is None else time.monotonic() + seconds


def left(deadline: float | None) -> float:
    """Seconds until the deadline."""
    return math.inf if deadline is None else deadline - time.monotonic()


def is_over(deadline: float | None) -> bool:
    """Whether the deadline has passed."""
    return left(deadline) <= 0
