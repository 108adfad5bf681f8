"""Settings of the allocator under which steps are timed, and of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# glibc: never give memory back, and take big blocks from the heap too.
ALLOCATORS = {
    "default": {},
    "tuned": {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
}


@contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """Processes that start within have these settings, and one thread."""
    before = dict(os.environ)
    os.environ.update(settings, OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
