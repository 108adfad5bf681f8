"""Taking times: warm up, choose the number of runs by a budget, report the median.

A run marks its moments; the time between two marks is taken on the device's own clock, so that a
GPU is not waited for between runs:

    mark --- forward --- mark --- backward --- mark

On a CPU with one thread that is the thread's own clock, which stands still while other processes
have the core: on a busy machine it gives the same numbers, where a wall clock gave half a batch
2.3 x the time of the whole one.

The first runs take new memory, and a page that is touched for the first time may cost more than the
work on it; glibc's heap needed six runs of a large ReLU until it gave the same pages again, as it does
step after step in training. So only runs that met no new pages count, where there are enough of them.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

WARM_UPS = 2  # the first run allocates and selects kernels, the second settles caches
SETTLING = 5  # budgets that all runs may take to meet no new pages; once one did, the next will soon
FEW_PAGES = 16  # new ones in a run that counts all the same
MIN_RUNS, MAX_RUNS = 3, 200
BUDGET_SECONDS = 0.2  # per call; the median of a small operator is steady well before

Mark: TypeAlias = "float | torch.cuda.Event"


@dataclass(frozen=True, slots=True)
class Times:
    """Medians of the parts between marks, in seconds."""

    parts: tuple[float, ...]
    runs: int
    spread: float  # interquartile range over median, of whole runs


def repeat(
    run: Callable[[Callable[[], Mark]], Sequence[Mark]], device: torch.device, budget: float = BUDGET_SECONDS
) -> Times:
    """Time `run`, which calls the marker it is given and returns its marks in order."""

    def mark() -> Mark:
        return _mark(device)

    for _ in range(WARM_UPS):
        run(mark)
    synchronize(device)
    start = time.perf_counter()
    run(mark)
    synchronize(device)
    wanted = num_runs(time.perf_counter() - start, budget)
    marked: list[Sequence[Mark]] = []
    settled: list[Sequence[Mark]] = []
    end = time.perf_counter() + SETTLING * budget

    def goes_on() -> bool:
        if len(marked) < wanted:
            return True
        if settled and len(settled) < MIN_RUNS:
            return len(marked) < MAX_RUNS
        return len(settled) < wanted and time.perf_counter() < end

    while goes_on():
        before = _new_pages()
        marked.append(run(mark))
        if _new_pages() - before <= FEW_PAGES:
            settled.append(marked[-1])
    synchronize(device)
    counted = settled if len(settled) >= MIN_RUNS else marked
    laps = [[_between(a, b) for a, b in zip(marks, marks[1:], strict=False)] for marks in counted]
    return Times(
        parts=tuple(statistics.median(part) for part in zip(*laps, strict=True)),
        runs=len(counted),
        spread=spread([sum(lap) for lap in laps]),
    )


def _new_pages() -> int:
    """Pages of memory that this process has met so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def num_runs(seconds: float, budget: float) -> int:
    """How many runs of `seconds` each the budget allows."""
    return max(MIN_RUNS, min(MAX_RUNS, int(budget / max(seconds, 1e-9))))


def spread(seconds: Sequence[float]) -> float:
    """The interquartile range over the median."""
    lower, middle, upper = statistics.quantiles(seconds, n=4)
    return (upper - lower) / middle if middle else 0.0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float), "marks of one device"
        return end - start
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000
