"""Each slip is made in a copy of the tree, and the tests that touch it say whether they notice.

A test that fails with the slip must pass without it, or it says nothing and the others are asked again. Tests
that come to no end have noticed it if without it they take half the time at most; else the machine is busy,
and half of them are asked again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.slips import Slip
from tests.mutants.touching import Recording
from tests.mutants.trial import Copy, copied

TRIAL = ["-x", "--tb=line", "-p", "no:xdist", "-p", "tests.mutants.failures", "--hypothesis-seed=0"]
PATIENCE = 4  # times the seconds that tests took when they were recorded, at least
PAUSE = 0.1  # seconds, until what runs is ended again


class Outcome(Enum):
    CAUGHT = "caught"
    SURVIVED = "survived"
    UNTOUCHED = "not touched by any test"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a slip; `by` is the test that noticed it, or how."""

    slip: Slip
    outcome: Outcome
    by: str
    seconds: float


def trials(
    slips: Sequence[Slip], recording: Recording, root: Path, *, jobs: int, limit: float
) -> Iterator[Trial]:
    """Try all slips, `jobs` at a time, each for about `limit` seconds at most; as they end."""
    with ExitStack() as stack:
        copies = [stack.enter_context(copied(root)) for _ in range(max(1, min(jobs, len(slips))))]
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def run(slip: Slip) -> Trial:
            copy = free.get()
            try:
                return tried(slip, recording, copy, limit)
            finally:
                free.put(copy)

        pool = stack.enter_context(ThreadPoolExecutor(len(copies)))
        futures = [pool.submit(run, slip) for slip in slips]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            _stop(futures, copies)


def _stop(futures: Sequence[Future[Trial]], copies: Sequence[Copy]) -> None:
    """Nothing more begins, and what runs is ended."""
    for copy in copies:
        copy.closed = True
    for future in futures:
        future.cancel()
    while not all(future.done() for future in futures):
        for copy in copies:
            copy.end_all()
        time.sleep(PAUSE)


def tried(slip: Slip, recording: Recording, copy: Copy, limit: float) -> Trial:
    begin = time.monotonic()
    tests = recording.chosen(slip, copy.root, limit)
    by = _noticed(slip, tests, recording, copy, limit)
    outcome = Outcome.CAUGHT if by else Outcome.SURVIVED
    if not by and not recording.touches(slip):
        outcome = Outcome.UNTOUCHED
    return Trial(slip, outcome, by or f"{len(tests)} tests passed", time.monotonic() - begin)


def _noticed(slip: Slip, tests: list[str], recording: Recording, copy: Copy, limit: float) -> str | None:
    """The test that notices the slip, if one does."""
    while tests:
        patience = max(limit, PATIENCE * sum(recording.seconds[test] for test in tests))
        with copy.slipped(slip):
            ran = copy.pytest([*TRIAL, *tests], seconds=patience)
        if ran.code == 0:
            return None
        if ran.code is None:
            if copy.pytest([*TRIAL, *tests], seconds=patience / 2).code is not None:
                return f"no end within {patience:.0f} s"
            tests = tests[: len(tests) // 2]
            continue
        failed = list(ran.failed) or tests[:1]  # none of its own where an import fails
        if copy.pytest([*TRIAL, *failed], seconds=patience).code == 0:
            return ran.failed[0] if ran.failed else f"exit code {ran.code}"
        tests = [test for test in tests if test not in failed]
    return None
