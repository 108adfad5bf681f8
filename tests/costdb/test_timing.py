"""Runs that meet new pages of memory, or a slow second of the machine, take longer than those to come, and
don't count. The clock here moves by the work that is done alone."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from itertools import count, groupby

import pytest
import torch

from costdb import timing
from costdb.timing import FEW_PAGES, LONG_VISITS, MIN_RUNS, VISITS, WARM_UPS, Mark, Run, repeat, take_turns

SLOW, FAST = 0.02, 0.001
CPU = torch.device("cpu")


class Clock:
    """A wall clock and a thread's own clock in one."""

    def __init__(self) -> None:
        self.now = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def slow_on_new_pages(clock: Clock, is_new: Callable[[int], bool]) -> Run:
    numbers = count()

    def run(mark: Callable[[], Mark]) -> Sequence[Mark]:
        new = is_new(next(numbers))
        start = mark()
        if new:
            with mmap.mmap(-1, 8 * FEW_PAGES * mmap.PAGESIZE) as memory:
                for page in range(0, len(memory), mmap.PAGESIZE):
                    memory[page] = 1
        clock.work(SLOW if new else FAST)
        return start, mark()

    return run


def test_runs_count_once_they_meet_no_new_pages(clock: Clock) -> None:
    settles = WARM_UPS + 1 + MIN_RUNS + 2
    times = repeat(slow_on_new_pages(clock, lambda number: number < settles), CPU, budget=0.05)
    assert times.runs >= MIN_RUNS
    assert times.parts == pytest.approx([FAST])


def test_where_pages_are_always_new_all_runs_count(clock: Clock) -> None:
    times = repeat(slow_on_new_pages(clock, lambda number: True), CPU, budget=0.05)
    assert times.runs >= MIN_RUNS
    assert times.parts == pytest.approx([SLOW])


def test_runs_take_turns_and_visits_in_slow_seconds_do_not_count(clock: Clock) -> None:
    turns: list[str] = []

    def named(name: str) -> Run:
        def run(mark: Callable[[], Mark]) -> Sequence[Mark]:
            turns.append(name)
            visit = sum(key == "a" for key, _ in groupby(turns)) - 1  # the first turn warms up
            start = mark()
            clock.work(SLOW if visit in (2, 3) else FAST)
            return start, mark()

        return run

    times = take_turns([named("a"), named("b")], CPU, budget=0.05)
    assert "".join(key for key, _ in groupby(turns)) == "ab" * (1 + VISITS)
    assert [each.parts for each in times] == [pytest.approx([FAST])] * 2


def test_what_takes_longer_than_its_budget_runs_a_few_times_and_the_fastest_is_told(clock: Clock) -> None:
    seconds = iter([9.0, 3.0, 2.0])

    def run(mark: Callable[[], Mark]) -> Sequence[Mark]:
        start = mark()
        clock.work(next(seconds))
        return start, mark()

    times = repeat(run, CPU, budget=0.05)
    assert (times.runs, times.parts, times.least) == (LONG_VISITS, (2.5,), 2.0)


def test_a_gpu_idles_until_a_slow_host_has_told_all() -> None:
    """Twice as long as the host took: a GPU of 2 GHz."""
    assert timing.head_start(0.0) == timing.head_start(1e-4) == timing.HEAD_START
    assert timing.head_start(2e-3) == 8_000_000
    assert timing.head_start(1.0) == timing.MOST_START
