"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import autopar.ops  # noqa: F401  (what is true of operators is declared there)
from autopar.proof import processes
from tests.pool import Pool

torch.set_num_threads(1)  # many small tensors: threads only get in each other's way

# A machine that is busy with something else makes no test fail: no example has a time limit.
settings.register_profile("autopar", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("autopar")
UNTIL = "AUTOPAR_TESTS_UNTIL"  # seconds since 1970 after which no test starts, as CI says of slow ones


def pytest_runtest_setup() -> None:
    """Where time is limited, a slow machine runs fewer tests, and says that it skipped the others."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip("out of time")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector, and what looks through all objects, need not walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cost database of this session's own: not the user's, nor that of tests that run beside these, whose
    measurements would come between two plans that are compared."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """`pools(n)`: n gloo workers, started at their first call and kept warm."""
    started: dict[int, Pool] = {}
    yield lambda size: started.setdefault(size, Pool(size))
    for pool in started.values():
        pool.close()


@pytest.fixture
def warm_ranks(pools: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs on real processes take those of the pool: none is started for each."""
    monkeypatch.setattr(
        processes, "run_function", lambda function, size, *arguments: pools(size).run(function, *arguments)
    )
