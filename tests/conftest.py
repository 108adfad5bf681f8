"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """`pools(n)`: n gloo workers, started at their first call and kept warm."""
    started: dict[int, Pool] = {}
    yield lambda size: started.setdefault(size, Pool(size))
    for pool in started.values():
        pool.close()
