"""Starts a script again after a fault, on what is there, until it has come to its end.

    4 ranks ── rank 2 is killed ──> 3 ranks ── a device is back ──> 4 ranks ──> the end
               a plan for 3, newest save,      all save, a plan for 4,
               next sample                     next sample

What the ranks do so that nothing is lost is the script's: it goes through `autopar.steps`, or calls
`autopar.load` and `autopar.save`.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.core.elastic_bounds import DEVICES_SECONDS, RESTARTED, Elastic
from autopar.errors import InputError, WorkerError
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import Launch, launch
from autopar.runtime.launch.leaving import LEFT, LeaveRequest

ENDING_SECONDS = 2  # that ranks have which are left after a fault


@dataclass(slots=True)
class History:
    """Faults of a run since its last new step, by which it is told whether it may be started again."""

    elastic: Elastic
    furthest: int | None = None
    faults: list[str] = field(default_factory=list)

    def may_go_on(self, error: WorkerError) -> bool:
        """Whether the run may be started again after this: not where it would only come to it again."""
        if error.step is not None and (self.furthest is None or error.step > self.furthest):
            self.furthest, self.faults = error.step, []
        fault = "" if error.is_lost else cause_of(error)
        comes_again = fault != "" and fault in self.faults
        self.faults.append(fault)
        ends = error.is_end or error.exit_code in worker.REFUSED
        return not (ends or comes_again or len(self.faults) > self.elastic.restarts)


def cause_of(error: WorkerError) -> str:
    """The line of a fault and its kind, the same whenever it comes again."""
    lines = re.findall(r'File "(.+)", line (\d+)', error.traceback)
    kind = error.found.partition(":")[0]
    return f"{kind} at {':'.join(lines[-1])}" if lines else kind


@dataclass(slots=True)
class _Growth:
    """Whether there are more devices than ranks: asked now and then, and remembered."""

    elastic: Elastic
    size: int
    asked: float = field(default_factory=time.monotonic)
    wanted: int = 0

    def __call__(self) -> bool:
        if self.elastic.devices is None or time.monotonic() - self.asked < DEVICES_SECONDS:
            return self.wanted > 0
        self.asked = time.monotonic()
        try:
            there = self.elastic.there(self.size)
        except InputError:  # told at the next start, if it stays so
            return False
        self.wanted = there if there != self.size else 0
        return self.wanted > 0


def run_elastic(
    job: Launch,
    elastic: Elastic,
    *,
    run: Callable[[Launch], None] = launch,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Run a job, and start it again after faults on the ranks that are there; `run` runs it once.

    Raises the WorkerError after which it isn't started again, of exit code 75 once a signal has asked the
    launcher to leave, InputError where too few devices are left, KeyboardInterrupt.
    """
    with LeaveRequest() as request:
        _run_asked(job, elastic, request, run, tell or partial(print, file=sys.stderr, flush=True))


def _run_asked(
    job: Launch,
    elastic: Elastic,
    request: LeaveRequest,
    run: Callable[[Launch], None],
    tell: Callable[[str], None],
) -> None:
    """Run a job until its end, a fault that ends it, or a request to leave."""
    history, begin = History(elastic), time.monotonic()
    size = elastic.there(elastic.most)
    while True:
        if request.signal is not None:
            raise _asked(request.signal)
        growth, timeout = _Growth(elastic, size), _left(job.watch.timeout, begin)
        watch = replace(job.watch, wants_change=growth, timeout=timeout, request=request)
        try:
            run(replace(job, num_processes=size, watch=watch, grace=ENDING_SECONDS))
        except WorkerError as error:
            is_change = error.exit_code == LEFT and growth.wanted > 0 and request.signal is None
            if not is_change and (error.exit_code == LEFT or not history.may_go_on(error)):
                raise
            if request.signal is not None:
                raise _asked(request.signal) from error
            lost = max(elastic.least, size - 1) if error.is_lost else size
            before, size = size, elastic.there(lost)
            job = replace(job, variables={**job.variables, RESTARTED: "1"})
            tell(_told(error, before, size, is_change=is_change))
        except SystemExit as ended:
            if request.signal is not None and ended.code == 128 + request.signal:
                raise _asked(request.signal) from None  # before any rank has come to its loop
            raise
        else:
            return


def _asked(number: signal.Signals) -> WorkerError:
    return WorkerError(
        where="autopar run --elastic",
        found=f"{number.name} where no rank could save",
        wanted="ranks that run to their end",
        remedy="start it again, to go on from the last save",
        exit_code=LEFT,
    )


def _left(timeout: float | None, begin: float) -> float | None:
    return None if timeout is None else max(1e-3, timeout - (time.monotonic() - begin))


def _told(error: WorkerError, before: int, size: int, *, is_change: bool) -> str:
    ranks = f"{size} ranks" if size != before else f"the same {size} ranks"
    if is_change:
        return f"autopar: the number of devices has changed; going on with {ranks}"
    step = "before a first step" if error.step is None else f"after step {error.step}"
    fault = f"{error.where}: {error.found}, {step}; starting again with {ranks}"
    return f"{error.details}\nautopar: {fault}".lstrip()
