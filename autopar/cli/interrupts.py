"""Ctrl-C while a plan is sought: once for the best plan so far, twice to end the command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autopar.core.deadline import stop_search


@contextmanager
def stops_search() -> Iterator[None]:
    """Within, an interrupt stops the search that is watched."""
    before = signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    if not stop_search():
        raise KeyboardInterrupt
    print("autopar: stopping with the best plan so far; once more to give up", file=sys.stderr, flush=True)
