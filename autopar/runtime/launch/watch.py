"""A thread of the launcher looks at its ranks every second, and rings the alarm where they can't go on.

stopped by a signal for too long   a rank that ended before it joined   no step for too long   time is up
asked to leave, and still there after the time of grace
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from autopar.errors import WorkerError
from autopar.runtime.launch.children import children
from autopar.runtime.launch.flight_record import read_flights
from autopar.runtime.launch.leaving import LEAVE_SECONDS, LEAVE_SIGNALS, LeaveRequest
from autopar.runtime.launch.processes import STOPPED_SECONDS, RankProcess, is_stopped, process_of
from autopar.runtime.launch.rank_files import listens, never_joined, where_are

LOOK_SECONDS = 1.0  # between two looks at the ranks


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """When ranks are ended: after `timeout` seconds, or once none has made a step for `deadline` seconds.

    Once `wants_change` is true, ranks that listen are asked to leave, and have so much `grace`. Signals that
    ask the launcher are noted in `request`, which may have one already.
    """

    timeout: float | None = None
    deadline: float | None = None
    wants_change: Callable[[], bool] | None = None
    grace: float = LEAVE_SECONDS
    request: LeaveRequest | None = None


@dataclass(slots=True)
class Watch:
    """What a look sees; `errors` are why ranks are ended, `asks` when ranks were asked to leave."""

    logs: Path
    num_processes: int
    options: WatchOptions
    others: set[int]
    request: LeaveRequest
    begin: float = field(default_factory=time.monotonic)
    looks: Counter[int] = field(default_factory=Counter)
    errors: list[WorkerError] = field(default_factory=list)
    asked_at: float = math.inf
    asked_by: str = ""

    @property
    def ranks(self) -> set[int]:
        """Process ids of this launch's ranks."""
        return children() - self.others

    def ask(self, number: int, by: str) -> bool:
        """Ask ranks to leave by a signal; false if none listens to it."""
        listening = [pid for pid in self.ranks if listens(pid, number)]
        for pid in listening:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if listening and math.isinf(self.asked_at):
            self.asked_at, self.asked_by = time.monotonic(), by
        return bool(listening)

    def look(self) -> None:
        """Look once at all ranks."""
        ranks, now = self.ranks, time.monotonic()
        if now >= self.begin + (self.options.timeout or math.inf):
            found = f"still running after {self.options.timeout} s"
            self.errors.append(_late(found, self.logs, ranks, is_end=True))
        self.errors.extend(_stopped(process_of(pid)) for pid in ranks if self._has_stopped(pid))
        if (absent := never_joined(self.logs)) is not None:
            self.errors.append(_absent(absent, self.num_processes))
        if (stuck := self._stuck()) is not None:
            self.errors.append(_late(stuck, self.logs, ranks))
        if now >= self.asked_at + self.options.grace:
            found = f"still running {self.options.grace:g} s after {self.asked_by}"
            is_end = self.request.signal is not None
            self.errors.append(_late(found, self.logs, ranks, is_end=is_end))
        if math.isinf(self.asked_at) and self.request.signal is not None:  # nobody listened then
            self.ask(self.request.signal, self.request.signal.name)
        elif math.isinf(self.asked_at) and self.options.wants_change and self.options.wants_change():
            self.ask(signal.SIGUSR1, "another number of devices")

    def _has_stopped(self, pid: int) -> bool:
        """Whether a rank has been stopped for too long, by the looks at it."""
        self.looks[pid] = self.looks[pid] + 1 if is_stopped(process_of(pid)) else 0
        return self.looks[pid] * LOOK_SECONDS >= STOPPED_SECONDS

    def _stuck(self) -> str | None:
        """Words for ranks that have ended no step for too long, after their first; None where they go on."""
        if self.options.deadline is None:
            return None
        flights = read_flights(self.logs)
        last = max((flight.step_time for flight in flights.values()), default=0.0)
        if not last or time.time() - last < self.options.deadline:
            return None
        slowest = min(flights, key=lambda rank: (flights[rank].exchange, flights[rank].last_sign))
        return (
            f"no step for {self.options.deadline:g} s; furthest behind is rank {slowest}: {flights[slowest]}"
        )


@contextmanager
def watching(logs: Path, num_processes: int, options: WatchOptions) -> Iterator[Watch]:
    """Within, a thread looks at the ranks, and rings the alarm once there is an error; signals that ask to
    leave are passed on to them."""
    request = options.request or LeaveRequest()
    watch, over = Watch(logs, num_processes, options, children(), request), threading.Event()
    end = watch.begin + (options.timeout or math.inf)

    def look() -> None:
        while not over.wait(max(0.0, min(LOOK_SECONDS, end - time.monotonic()))) and not watch.errors:
            watch.look()
        if watch.errors:
            os.kill(os.getpid(), signal.SIGALRM)

    thread = threading.Thread(target=look, daemon=True, name="autopar-watch")
    with _passing_on(watch):
        thread.start()
        try:
            yield watch
        finally:
            over.set()
            thread.join()


@contextmanager
def _passing_on(watch: Watch) -> Iterator[None]:
    """Within, ranks get the signals that ask to leave; where none listens SIGTERM ends them."""

    def pass_on(number: int, _: FrameType | None) -> None:
        name = watch.request.signal = signal.Signals(number)
        if watch.ask(number, name.name):
            return
        if name is signal.SIGTERM:
            raise SignalException("asked to end", name)
        print(
            f"autopar: {name.name} found no rank in a loop of autopar.steps, which would save",
            file=sys.stderr,
            flush=True,
        )

    before = {number: signal.signal(number, pass_on) for number in LEAVE_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _late(found: str, logs: Path, ranks: set[int], *, is_end: bool = False) -> WorkerError:
    where = where_are(logs, ranks)
    return WorkerError(
        where="all ranks",
        found=found + (f", {where}" if where else ""),
        wanted="an end before that",
        remedy="raise the timeout, or look for ranks that wait for each other",
        is_end=is_end,
    )


def _absent(rank: str, num_processes: int) -> WorkerError:
    return WorkerError(
        where=f"rank {rank} of {num_processes}",
        found="its end, with exit code 0, before it joined the others, which wait for it",
        wanted="a script that comes to parallelize on every rank",
        remedy="leave out sys.exit, or a branch on the rank, before parallelize",
    )


def _stopped(process: RankProcess) -> WorkerError:
    return WorkerError(
        where=str(process),
        found=f"a process that has been stopped for {STOPPED_SECONDS:g} s",
        wanted="ranks that run",
        remedy=f"see who stopped it, and start again; kill -CONT {process.pid} in time lets it go on",
        is_lost=True,
    )
