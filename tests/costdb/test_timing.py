"""Runs that meet new pages of memory, or a slow second of the machine, take longer than those to come, and
don't count."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from itertools import count, groupby

import torch

from costdb.timing import FEW_PAGES, MIN_RUNS, VISITS, WARM_UPS, Mark, Run, repeat, take_turns

SLOW, FAST = 0.02, 0.001
CPU = torch.device("cpu")


def work(seconds: float) -> None:
    """Keeps the core busy, as time asleep does not count."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def slow_on_new_pages(is_new: Callable[[int], bool]) -> Run:
    numbers = count()

    def run(mark: Callable[[], Mark]) -> Sequence[Mark]:
        new = is_new(next(numbers))
        start = mark()
        if new:
            with mmap.mmap(-1, 8 * FEW_PAGES * mmap.PAGESIZE) as memory:
                for page in range(0, len(memory), mmap.PAGESIZE):
                    memory[page] = 1
        work(SLOW if new else FAST)
        return start, mark()

    return run


def test_runs_count_once_they_meet_no_new_pages() -> None:
    settles = WARM_UPS + 1 + MIN_RUNS + 2
    times = repeat(slow_on_new_pages(lambda number: number < settles), CPU, budget=0.05)
    assert times.runs >= MIN_RUNS
    assert times.parts[0] < SLOW / 2


def test_where_pages_are_always_new_all_runs_count() -> None:
    times = repeat(slow_on_new_pages(lambda number: True), CPU, budget=0.05)
    assert times.runs >= MIN_RUNS
    assert times.parts[0] >= SLOW / 2


def test_runs_take_turns_and_visits_in_slow_seconds_do_not_count() -> None:
    turns: list[str] = []

    def named(name: str) -> Run:
        def run(mark: Callable[[], Mark]) -> Sequence[Mark]:
            turns.append(name)
            visit = sum(key == "a" for key, _ in groupby(turns)) - 1  # the first turn warms up
            start = mark()
            work(SLOW if visit in (2, 3) else FAST)
            return start, mark()

        return run

    times = take_turns([named("a"), named("b")], CPU, budget=0.05)
    assert "".join(key for key, _ in groupby(turns)) == "ab" * (1 + VISITS)
    assert all(each.parts[0] < SLOW / 2 for each in times)
