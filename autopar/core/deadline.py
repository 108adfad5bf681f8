"""By when a search is to be done, by the monotonic clock; None if it may take as long as it takes.

A search that is watched ends wherever it is, soon after its deadline or after it is stopped: whatever takes
long calls `check_time` as it goes on, which then raises OutOfTimeError. It tells what it does on the way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from autopar.errors import OutOfTimeError
from autopar.units import show_seconds

SECONDS_BETWEEN_WORDS = 1.0  # of what a search is doing


def after(seconds: float | None) -> float | None:
    """The deadline in so many seconds."""
    return None if seconds is None else time.monotonic() + seconds


def left(deadline: float | None) -> float:
    """Seconds until the deadline; none once the search that is watched is stopped."""
    watch = _WATCH.get()
    if watch is not None and watch.is_stopped:
        return 0.0
    return math.inf if deadline is None else deadline - time.monotonic()


def is_over(deadline: float | None) -> bool:
    """Whether the deadline has passed."""
    return left(deadline) <= 0


@dataclass(slots=True)
class SearchWatch:
    """Watches a search: when it must end, and who hears what it is doing."""

    deadline: float | None = None
    tell: Callable[[str], None] | None = None
    is_stopped: bool = False
    best: float = math.inf  # seconds of the best step so far
    doing: str = ""
    told: float = 0.0  # when somebody last heard

    def stop(self) -> None:
        """End the search at the next place where it looks; the best plan so far is its answer."""
        self.is_stopped = True

    def say(self, doing: str) -> None:
        """Tell what is done now, and the best so far."""
        self.doing, self.told = doing, time.monotonic()
        if self.tell is not None:
            best = f"; best so far {show_seconds(self.best)} a step" if self.best < math.inf else ""
            self.tell(doing + best)


_WATCH: ContextVar[SearchWatch | None] = ContextVar("search watch", default=None)


@contextmanager
def watched(watch: SearchWatch | None) -> Iterator[None]:
    """What runs within is watched; by None it isn't, as what makes a plan of an answer."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def say(doing: str) -> None:
    """Tell who hears of the search what it does now."""
    if (watch := _WATCH.get()) is not None:
        watch.say(doing)


def note_step(seconds: float) -> None:
    """Note a step that was found, for who hears of the search."""
    if (watch := _WATCH.get()) is not None:
        watch.best = min(watch.best, seconds)


def current_watch() -> SearchWatch | None:
    """The search that is watched, if one is."""
    return _WATCH.get()


def stop_search() -> bool:
    """End the search that is watched; False if there is none, or it is stopped already."""
    watch = _WATCH.get()
    if watch is None or watch.is_stopped:
        return False
    watch.stop()
    return True


def check_time() -> None:
    """Raise OutOfTimeError if the search that is watched must end."""
    watch = _WATCH.get()
    if watch is None:
        return
    now = time.monotonic()
    if watch.is_stopped or (watch.deadline is not None and now > watch.deadline):
        raise OutOfTimeError(
            where="search",
            found="no answer yet" if watch.is_stopped else "the time limit",
            wanted="a plan in time",
            remedy="give more with --time-limit" if not watch.is_stopped else "let it go on",
        )
    if watch.doing and now - watch.told >= SECONDS_BETWEEN_WORDS:
        watch.say(watch.doing)
