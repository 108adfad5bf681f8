"""Start local worker processes and end them all together.

torch's elastic agent starts the ranks, watches them and stops all when one fails. Around it:

    launcher ── agent ──┬─ worker: rank 0    output passes through as it is
                        └─ worker: rank 1    output prefixed with [rank 1]

- the rank that failed first is named, with its traceback or signal (see `worker` for "first");
- exit codes say what happened: 0 done, 2 or 3 what autopar refused there, 4 a worker failed, 130 interrupted,
  75 asked to leave, and saved (torchrun: always 1);
- no worker outlives the launcher, even one that is killed: they ask the kernel to die with it;
- the environment and the signal handlers, which the agent changes, are put back.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar.core.promised_world import PromisedNodes
from autopar.core.user_text import is_file
from autopar.errors import INTERRUPTED, InputError, WorkerError, show_value
from autopar.runtime.launch import call_main, worker
from autopar.runtime.launch.children import end_all_but, end_tails
from autopar.runtime.launch.flight_record import read_flights, tell_flights
from autopar.runtime.launch.leaving import LEFT
from autopar.runtime.launch.watch import WatchOptions, watching
from autopar.torch_seams.launching import ending_ranks

Result = TypeVar("Result")

WORKER_FAILED = 4
GRACE = 5  # seconds that an interrupted rank has for its own cleaning up
_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)


def run_script(
    script: str, num_processes: int, arguments: Sequence[str] = (), *, timeout: float | None = None
) -> int:
    """Run a script as `start_script` does, and return the exit code.

    0: all ranks ended well, 4: a rank failed or the time is up, 2 or 3: autopar refused something there (told
    on stderr), 130: interrupted.
    """
    try:
        start_script(script, num_processes, arguments, timeout=timeout)
    except WorkerError as error:
        print(f"{error.details}\nautopar: {error}".lstrip(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def start_script(
    script: str,
    num_processes: int,
    arguments: Sequence[str] = (),
    *,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a Python script on `num_processes` ranks of this machine until all have ended.

    `variables` are added to its environment. Raises InputError if there is no such script, WorkerError if
    a rank failed or `timeout` seconds passed, KeyboardInterrupt. Call it from the main thread.
    """
    require_script(script)
    launch(Launch([script, *arguments], num_processes, variables or {}, WatchOptions(timeout)))


def require_script(script: str) -> None:
    """Raise InputError unless there is such a file."""
    if not is_file(script):
        raise InputError(
            where="script", found=show_value(script), wanted="a Python file", remedy="check the path"
        )


def run_function(
    function: Callable[..., Result], num_processes: int, *arguments: object, timeout: float | None = None
) -> list[Result]:
    """Call `function(*arguments)` on every rank; the results, rank 0 first.

    Function, arguments and results are pickled. What the ranks print goes to stderr. Raises
    WorkerError for the rank that failed first. Call it from the main thread.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        (folder / call_main.CALL).write_bytes(pickle.dumps(sys.path) + _pickled(function, arguments))
        launch(Launch([call_main.__file__, name], num_processes, {}, WatchOptions(timeout)))
        results = (folder / call_main.RESULT.format(rank=rank) for rank in range(num_processes))
        return [pickle.loads(result.read_bytes()) for result in results]


def _pickled(function: Callable[..., object], arguments: tuple[object, ...]) -> bytes:
    try:
        if function.__module__ == "__main__":
            raise pickle.PicklingError("it is defined in the main program")
        return pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as cause:
        raise InputError(
            where=f"function {function.__qualname__}",
            found=str(cause),
            wanted="a function of an importable module, with arguments that pickle",
            remedy="move it to the top level of a module",
        ) from cause


@dataclass(frozen=True, slots=True)
class Launch:
    """A script with its arguments, on so many ranks here; those left are ended within `grace` seconds.

    With several `nodes` launchers meet where these say.
    """

    command: Sequence[str]
    num_processes: int
    variables: Mapping[str, str] = field(default_factory=dict)
    watch: WatchOptions = WatchOptions()
    grace: int = GRACE
    nodes: PromisedNodes | None = None


def launch(job: Launch) -> None:
    """Run a job's ranks until all have ended; WorkerError or KeyboardInterrupt if they don't end well."""
    if job.num_processes < 1:
        raise InputError(
            where="number of processes",
            found=str(job.num_processes),
            wanted="at least 1",
            remedy="start some",
        )
    with (
        tempfile.TemporaryDirectory(prefix="autopar-") as logs,
        _environment(job),
        _signals(),
        _short_grace(job.grace),
        watching(Path(logs), job.num_processes, job.watch) as watch,
        _quiet(),
        _lines(),
    ):
        try:
            start = elastic_launch(_config(job, logs), sys.executable)
            start("-m", "autopar.runtime", *job.command)
        except ChildFailedError as error:
            # Agents list failures as they see them; the time stamps would be whole seconds only.
            rank, failure = next(iter(error.failures.items()))
            raise _with_flights(_worker_error(rank, job.num_processes, failure), Path(logs)) from None
        except SignalException as error:
            end_all_but(watch.others)
            end_tails()
            if watch.errors:
                raise _with_flights(watch.errors[0], Path(logs)) from None
            raise _interruption(error.sigval) from None


def _with_flights(error: WorkerError, logs: Path) -> WorkerError:
    """The error, with what the ranks' records say of where they were."""
    flights = read_flights(logs)
    error.step = max((flight.step for flight in flights.values() if flight.step_time), default=None)
    error.flights = tell_flights(flights)
    return error


def _config(job: Launch, logs: str) -> LaunchConfig:
    """No restarts, and a rendezvous on a free port of the loopback device, or where nodes meet."""
    others = dict.fromkeys(range(1, job.num_processes), Std.ALL)
    meets = job.nodes is not None and job.nodes.nodes > 1
    return LaunchConfig(
        min_nodes=job.nodes.nodes if job.nodes else 1,
        max_nodes=job.nodes.nodes if job.nodes else 1,
        nproc_per_node=job.num_processes,
        max_restarts=0,
        run_id=job.nodes.run_id if job.nodes and meets else uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=job.nodes.endpoint if job.nodes and meets else "localhost:0",
        local_addr=None if meets else "127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=logs, tee=others),
        log_line_prefix_template="[rank ${rank}] ",
        signals_to_handle=",".join(number.name for number in _SIGNALS),
    )


def _worker_error(rank: int, num_processes: int, failure: ProcessFailure) -> WorkerError:
    where, wanted = f"rank {rank} of {num_processes}", "ranks that all run to their end"
    message = failure.error_file_data["message"]
    if isinstance(message, dict):  # recorded by the rank itself
        found, traceback = message["message"], message["extraInfo"]["py_callstack"]
        if (ended := message["extraInfo"].get(worker.ENDED)) is not None:
            where = f"rank {ended} of {num_processes}, which others wait for"
        return WorkerError(
            where=where,
            found=found,
            wanted=wanted,
            remedy="see its traceback",
            traceback=traceback,
            exit_code=failure.exitcode if failure.exitcode in worker.REFUSED else WORKER_FAILED,
        )
    if failure.exitcode == LEFT:
        found, remedy = (
            "its end after a save, as it was asked to leave",
            "start it again, to go on from there",
        )
        return WorkerError(where=where, found=found, wanted=wanted, remedy=remedy, exit_code=LEFT)
    if failure.exitcode < 0:
        found = f"death by {failure.signal_name()}"
        remedy = "if nobody sent it, see its output and the system's log (SIGKILL: often out of memory)"
        return WorkerError(where=where, found=found, wanted=wanted, remedy=remedy, is_lost=True)
    found, remedy = f"exit code {failure.exitcode}", "the script ended itself: see its output"
    return WorkerError(where=where, found=found, wanted=wanted, remedy=remedy)


def _interruption(number: signal.Signals) -> BaseException:
    return KeyboardInterrupt() if number is signal.SIGINT else SystemExit(128 + number)


@contextmanager
def _environment(job: Launch) -> Iterator[None]:
    """Set environment variables that workers inherit: whom to die with, and a fair share of the cores."""
    before = dict(os.environ)
    os.environ.update(job.variables)
    threads = max(1, len(os.sched_getaffinity(0)) // job.num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(job.grace))  # torch 2.12 and later
    os.environ[worker.LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signals() -> Iterator[None]:
    """Put back the handlers that the agent replaces; it treats the alarm as one more stop signal."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    signal.signal(signal.SIGALRM, _alarmed)  # until the agent has its own
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _alarmed(number: int, _frame: FrameType | None) -> NoReturn:
    raise SignalException("the alarm", signal.Signals(number))


@contextmanager
def _short_grace(grace: int) -> Iterator[None]:
    """Have the agent wait no longer for ranks that it ends after a failure than for those of an interrupt."""
    shutdown = ending_ranks.now

    def brief(self: Any, death_sig: signal.Signals = signal.SIGTERM, timeout: int = grace) -> None:
        shutdown(self, death_sig, min(timeout, grace))

    with ending_ranks.replaced(brief):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute what the agent logs about failures and signals: it may name a rank that it ended itself."""
    loggers = [logging.getLogger(module.__name__) for module in (multiprocessing.api, agent_api)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _lines() -> Iterator[None]:
    """Pass on the ranks' lines whole and as they come, into a file or a pipe too."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.line_buffering, stream.write_through
    stream.reconfigure(line_buffering=True, write_through=False)
    try:
        yield
    finally:
        stream.reconfigure(line_buffering=before[0], write_through=before[1])
