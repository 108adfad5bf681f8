"""Taking times: warm up, choose the number of runs by a budget, visit each run several times.

A run marks its moments; the time between two marks is taken on the device's own clock, so that a
GPU is not waited for between runs:

    mark --- forward --- mark --- backward --- mark

So that what counts is what the GPU does, and not how fast Python tells it to, it first idles for so long that
all has been told before it begins.

On a CPU with one thread that is the thread's own clock, which stands still while other processes
have the core: on a busy machine it gives the same numbers, where a wall clock gave half a batch
2.3 x the time of the whole one.

A machine that is shared has slow seconds, in which everything takes up to half as long again. So runs that
will be compared take turns, and the median of several visits leaves out those that met slow seconds:

    visit 1   a a a  b  c c        visit 2   a a a  b  c c        ...
                     |----- slow -----|

On such a machine the ratio of two convolutions of the same flops scattered by 5 to 8 % (standard deviation)
with the median of four visits, by 9 to 15 % with one visit as long.

The first runs take new memory, and a page that is touched for the first time may cost more than the
work on it; glibc's heap needed six runs of a large ReLU until it gave the same pages again, as it does
step after step in training. So only runs that met no new pages count, where there are enough of them.

An operator that takes longer than its budget needs fewer runs: what scatters is averaged inside of one.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from autopar.torch_seams.devices import sleep_on_gpu

WARM_UPS = 2  # the first run allocates and selects kernels, the second settles caches
VISITS = 5
SURELY = 10  # budgets that one run takes of what isn't just slow for once
LONG_VISITS = 2  # of what takes longer than its budget, after one run to warm up
SETTLING = 5  # budgets that all runs may take to meet no new pages; once one did, the next will soon
HEAD_START = 1_000_000  # cycles for which a GPU idles before a run, at least: half a millisecond or so
MOST_START = 40_000_000  # and at most
CYCLES = 4e9  # in a second, by twice the clock of a GPU: the host takes longer now and then
FEW_PAGES = 16  # new ones in a run that counts all the same
MIN_RUNS, MAX_RUNS = 3, 200
BUDGET_SECONDS = 0.2  # per call; the median of a small operator is steady well before

Mark: TypeAlias = "float | torch.cuda.Event"
Run: TypeAlias = Callable[[Callable[[], Mark]], Sequence[Mark]]  # calls the marker; its marks in order
Lap: TypeAlias = list[float]  # seconds of each part of one run


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the parts between marks: the median of the visits' medians."""

    parts: tuple[float, ...]
    runs: int
    spread: float  # interquartile range over median, of whole runs
    least: float  # seconds of the fastest run, as a whole


def repeat(run: Run, device: torch.device, budget: float = BUDGET_SECONDS) -> Times:
    """Time one run for about `budget` seconds."""
    return take_turns([run], device, budget)[0]


def take_turns(runs: Sequence[Run], device: torch.device, budget: float = BUDGET_SECONDS) -> list[Times]:
    """Time `runs`, each for about `budget` seconds, in turns."""
    timed = [_Timed(run, device, budget / VISITS) for run in runs]
    for number in range(VISITS):
        for each in timed:
            if number < each.num_visits:
                each.visit()
    return [each.times() for each in timed]


class _Timed:
    """A run that is warm, and what its visits of `budget` seconds found."""

    def __init__(self, run: Run, device: torch.device, budget: float) -> None:
        self.run, self.device, self.budget = run, device, budget
        self.head_start = HEAD_START
        self.visits: list[list[Lap]] = []
        self.settled: list[list[Lap]] = []  # of each visit, the runs that met no new pages
        seconds, most = self._warm_up(), VISITS * budget
        if most < seconds < SURELY * most:  # the first run may be slow, of what isn't
            seconds = self._warm_up()
        self.num_visits = LONG_VISITS if seconds > most else VISITS
        if self.num_visits == VISITS:
            for _ in range(WARM_UPS - 1):
                self._marks()
            seconds = self._warm_up()
        self.wanted = max(1, min(MAX_RUNS, int(budget / max(seconds, 1e-9))))

    def _warm_up(self) -> float:
        """Wall seconds of a run that doesn't count; its head start follows what the host took to tell it."""
        synchronize(self.device)
        start = time.perf_counter()
        self._marks()
        told = time.perf_counter() - start
        self.head_start = head_start(told)
        synchronize(self.device)
        return time.perf_counter() - start

    def visit(self) -> None:
        marked: list[Sequence[Mark]] = []
        settled: list[Sequence[Mark]] = []
        end = time.perf_counter() + SETTLING * self.budget
        while len(marked) < self.wanted or (
            len(settled) < self.wanted and len(marked) < MAX_RUNS and time.perf_counter() < end
        ):
            before = new_pages()
            marked.append(self._marks())
            if new_pages() - before <= FEW_PAGES:
                settled.append(marked[-1])
        synchronize(self.device)
        self.visits.append([_lap(marks) for marks in marked])
        self.settled.append([_lap(marks) for marks in settled])

    def times(self) -> Times:
        enough = sum(map(len, self.settled)) >= min(MIN_RUNS, self.num_visits)
        visits = [visit for visit in (self.settled if enough else self.visits) if visit]
        medians = [[statistics.median(part) for part in zip(*visit, strict=True)] for visit in visits]
        laps = [sum(lap) for visit in visits for lap in visit]
        return Times(
            parts=tuple(statistics.median(part) for part in zip(*medians, strict=True)),
            runs=len(laps),
            spread=spread(laps),
            least=min(laps),
        )

    def _marks(self) -> Sequence[Mark]:
        if self.device.type == "cuda":
            sleep_on_gpu(self.head_start)
        return self.run(lambda: moment(self.device))


def _lap(marks: Sequence[Mark]) -> Lap:
    return [between(a, b) for a, b in zip(marks, marks[1:], strict=False)]


def head_start(host_seconds: float) -> int:
    """Cycles for which a GPU idles, until a host that takes so long has told it all of a run."""
    return int(min(MOST_START, max(HEAD_START, CYCLES * host_seconds)))


def new_pages() -> int:
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
    """Wait until a GPU has done all that it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moment(device: torch.device) -> Mark:
    """Now, by the device's clock."""
    if device.type != "cuda":
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(start: Mark, end: Mark) -> float:
    """Seconds from one moment to another."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float), "marks of one device"
        return end - start
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000
