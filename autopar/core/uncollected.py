"""Planning and importing without Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without a search for cycles, as a decorator too; after it all is as before.

    Tracing and solving make millions of objects that stay, through all of which the collector would look
    again and again: that took 4 of 22 seconds for a GPT of 24 blocks, and 23 of 136 for one of 96.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
