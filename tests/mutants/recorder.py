"""A pytest plugin: which test runs which lines, and how long it takes.

Coverage runs in every process from its start (`COVERAGE_PROCESS_START`), as its own hook in site-packages
sees to. What is executed belongs to a context, which is a test's id:

    this process            switched before each test, its fixtures included
    ranks of a pool         live longer than a test, and end by a signal: every call carries the id along
    processes of a test     read it from their environment (`context = ${AUTOPAR_TEST-}` of the configuration)

Lines that run at import have no context: whichever test came first imported their module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

from tests.pool import Pool

TEST = "AUTOPAR_TEST"  # the variable with the test's id
DURATIONS = "AUTOPAR_DURATIONS"  # the variable with the folder for the tests' seconds
AFTER = "\x1f"  # comes before a test's id where the process has a context from its environment


class Recorded:
    """A call on a rank of a pool, for one test."""

    def __init__(self, function: Callable[..., Any], test: str) -> None:
        self.function, self.test = function, test

    def __call__(self, *args: Any) -> Any:
        coverage = Coverage.current()
        if coverage is None:
            return self.function(*args)
        coverage.switch_context(AFTER + self.test)
        try:
            return self.function(*args)
        finally:
            coverage.switch_context("")
            coverage.save()


def pytest_sessionstart() -> None:
    forkserver.ensure_running()  # before any test: its processes take its environment
    run = Pool.run

    def recorded(self: Pool, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return run(self, Recorded(function, os.environ.get(TEST, "")), *args, **options)

    Pool.run = recorded  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    coverage = Coverage.current()
    assert coverage is not None, "started by COVERAGE_PROCESS_START"
    os.environ[TEST] = item.nodeid
    coverage.set_option("run:context", item.nodeid)  # of processes that are forked, which don't read it again
    coverage.switch_context(AFTER + item.nodeid)
    try:
        return (yield)
    finally:
        coverage.switch_context("")
        del os.environ[TEST]


class Durations:
    """The seconds of each test of this process that passes, written at its end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.others: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.others.add(report.nodeid)
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        passed = {test: took for test, took in self.seconds.items() if test not in self.others}
        path = Path(os.environ[DURATIONS]) / f"{os.getpid()}.json"
        path.write_text(json.dumps(passed))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations())
