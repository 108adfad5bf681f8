"""A pytest plugin: the ids of tests that fail, a line each, into the file that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutants.trial import FAILED


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        with Path(os.environ[FAILED]).open("a") as file:
            file.write(f"{report.nodeid}\n")
