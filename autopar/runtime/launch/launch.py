"""Start local worker processes and end them all together.

torch's elastic agent starts the ranks, watches them and stops all when one fails. Around it:

    launcher ── agent ──┬─ worker: rank 0    output passes through as it is
                        └─ worker: rank 1    output prefixed with [rank 1]

- the rank that failed first is named, with its traceback or signal (see `worker` for "first");
- exit codes say what happened: 0 done, 2 or 3 what autopar refused there, 4 a worker failed, 130 interrupted
  (torchrun: always 1);
- no worker outlives the launcher, even one that is killed: they ask the kernel to die with it;
- the environment and the signal handlers, which the agent changes, are put back.
"""

from __future__ import annotations

import gc
import io
import logging
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar.core.user_text import is_file
from autopar.errors import INTERRUPTED, InputError, WorkerError, show_value
from autopar.runtime.launch import call_main, worker
from autopar.runtime.launch.processes import STOPPED_SECONDS, RankProcess, is_stopped, process_of
from autopar.runtime.launch.rank_files import never_joined, where_are
from autopar.torch_seams.launching import ending_ranks

Result = TypeVar("Result")

WORKER_FAILED = 4
LOOK_SECONDS = 1.0  # between two looks at the ranks
GRACE = 5  # seconds that an interrupted rank has for its own cleaning up
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)


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
        print(f"{error.traceback}\nautopar: {error}".lstrip(), file=sys.stderr)
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
    if not is_file(script):
        raise InputError(
            where="script", found=show_value(script), wanted="a Python file", remedy="check the path"
        )
    _launch([script, *arguments], num_processes, timeout, variables)


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
        _launch([call_main.__file__, name], num_processes, timeout)
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


def _launch(
    command: Sequence[str],
    num_processes: int,
    timeout: float | None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run `command` under `worker` on all ranks; WorkerError or KeyboardInterrupt if it doesn't end well."""
    if num_processes < 1:
        raise InputError(
            where="number of processes",
            found=str(num_processes),
            wanted="at least 1",
            remedy="start some",
        )
    with (
        tempfile.TemporaryDirectory(prefix="autopar-") as logs,
        _environment(num_processes, variables or {}),
        _signals(),
        _short_grace(),
        _watching(Path(logs), num_processes, timeout) as found,
        _quiet(),
        _lines(),
    ):
        others = _children()
        try:
            start = elastic_launch(_config(num_processes, logs), sys.executable)
            start("-m", "autopar.runtime", *command)
        except ChildFailedError as error:
            # Agents list failures as they see them; the time stamps would be whole seconds only.
            rank, failure = next(iter(error.failures.items()))
            raise _worker_error(rank, num_processes, failure) from None
        except SignalException as error:
            _end_all_but(others)
            _end_tails()
            raise (found[0] if found else _interruption(error.sigval)) from None


def _children() -> set[int]:
    """The ranks, of this launch and others, whose parent is this process."""
    found = set()
    for child in _processes():
        with suppress(OSError):  # it ended meanwhile
            if b"autopar.runtime" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(int(child))
    return found


def _processes() -> list[str]:
    """The processes whose parent is this one, by threads. One that ends meanwhile leaves its own to another,
    and all are asked anew. None where the kernel doesn't say."""
    while Path("/proc/thread-self/children").exists():
        with suppress(FileNotFoundError, ProcessLookupError):
            threads = os.listdir("/proc/self/task")
            lists = [Path(f"/proc/self/task/{thread}/children").read_text() for thread in threads]
            return [child for each in lists for child in each.split()]
    return []


def _end_all_but(others: set[int]) -> None:
    """End ranks of which the agent doesn't know: a signal may come while it starts them.

    The kernel's list of children can leave some out while others end, so it is read until it has none.
    """
    while ranks := _children() - others:
        for rank in ranks:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(rank, signal.SIGKILL)
                os.waitpid(rank, 0)


def _end_tails() -> None:
    """End threads that pass on the lines of such ranks: without the agent they would wait for more for ever,
    and the interpreter for them."""
    for each in gc.get_objects():
        if type(each) is TailLog and not each.stopped():
            each.stop()


def _config(num_processes: int, logs: str) -> LaunchConfig:
    """One node, no restarts, a rendezvous on a free port of the loopback device."""
    others = dict.fromkeys(range(1, num_processes), Std.ALL)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        max_restarts=0,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
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
    if failure.exitcode < 0:
        found = f"death by {failure.signal_name()}"
        remedy = "if nobody sent it, see its output and the system's log (SIGKILL: often out of memory)"
        return WorkerError(where=where, found=found, wanted=wanted, remedy=remedy)
    found, remedy = f"exit code {failure.exitcode}", "the script ended itself: see its output"
    return WorkerError(where=where, found=found, wanted=wanted, remedy=remedy)


def _interruption(number: signal.Signals) -> BaseException:
    return KeyboardInterrupt() if number is signal.SIGINT else SystemExit(128 + number)


def _late(timeout: float, where: str) -> WorkerError:
    return WorkerError(
        where="all ranks",
        found=f"still running after {timeout} s" + (f", {where}" if where else ""),
        wanted="an end before that",
        remedy="raise the timeout, or look for ranks that wait for each other",
    )


@contextmanager
def _environment(num_processes: int, variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that workers inherit: whom to die with, and a fair share of the cores."""
    before = dict(os.environ)
    os.environ.update(variables)
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))  # torch 2.12 and later
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
def _short_grace() -> Iterator[None]:
    """Have the agent wait no longer for ranks that it ends after a failure than for those of an interrupt."""
    shutdown = ending_ranks.now

    def brief(self: Any, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE) -> None:
        shutdown(self, death_sig, min(timeout, GRACE))

    with ending_ranks.replaced(brief):
        yield


@contextmanager
def _watching(logs: Path, num_processes: int, timeout: float | None) -> Iterator[list[WorkerError]]:
    """Within, a thread looks at the ranks; what it says of one that has been stopped for too long, or that
    others wait for in vain, or of all when the time is up, after which it rings the alarm."""
    found: list[WorkerError] = []
    over = threading.Event()
    others = _children()

    def look() -> None:
        looks, end = Counter[int](), time.monotonic() + (timeout or math.inf)
        while not over.wait(max(0.0, min(LOOK_SECONDS, end - time.monotonic()))) and not found:
            ranks = _children() - others
            if timeout and time.monotonic() >= end:
                found.append(_late(timeout, where_are(logs, ranks)))
            found.extend(_stopped(process_of(pid)) for pid in ranks if _has_stopped(pid, looks))
            if (absent := never_joined(logs)) is not None:
                found.append(_absent(absent, num_processes))
        if found:
            os.kill(os.getpid(), signal.SIGALRM)

    thread = threading.Thread(target=look, daemon=True, name="autopar-watch")
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _has_stopped(pid: int, looks: Counter[int]) -> bool:
    """Whether a rank has been stopped for too long, by the looks at it."""
    looks[pid] = looks[pid] + 1 if is_stopped(process_of(pid)) else 0
    return looks[pid] * LOOK_SECONDS >= STOPPED_SECONDS


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
    )


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
