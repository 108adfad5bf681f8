"""One rank: ends with its launcher, ends at once when it fails, joins and leaves the process group.

    python -m autopar.runtime script.py arguments...

runs the script as `python script.py arguments...` would, inside the safety net of `launch`.

The errors of the other ranks ("connection closed by peer") are consequences. To name the cause,
a rank that raised stays for a moment, so that the launcher always sees one failure before the next:

    rank 1   raise ── LINGER ──> exit      the launcher sees rank 1, ends rank 0
    rank 0   all-reduce ...          raise ── LINGER ──x

Two habits of torch at the end of the interpreter are worked around. A gloo thread that lets go of a
tensor wants the interpreter's lock, and aborts the process if that is ending; so a rank that succeeds
leaves its groups first, and gives the threads of those that something still holds time to settle. With
a collective under way that nobody joins the end waits for its timeout, so a rank that fails skips it. What
the interpreter's end would have done for the user it does itself: handlers of atexit run, files are flushed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record
from torch.distributed.rendezvous import rendezvous

from autopar.core.slurm import torchrun_variables
from autopar.errors import AutoparError, InputError, SolverError
from autopar.runtime.launch import flight_record, rank_files
from autopar.trace.call.user_source import is_tool

LAUNCHER = "AUTOPAR_LAUNCHER"  # the environment variable that holds the launcher's process id
ENDED = "ended rank"  # in what a rank leaves to the launcher, which it waited for
LINGER = 1.0  # seconds; ten polls of the launcher, so that a slow one still sees who came first
TIDY_SECONDS = 3.0  # for handlers of atexit and files of a rank that fails
SETTLE = 0.1  # seconds in which an idle thread gets a core, also on a busy machine
PROCESS_GROUP_TIMEOUT = 600.0  # seconds; torch's own are 30 minutes for gloo and 10 for NCCL
REFUSED = (
    InputError.exit_code,
    SolverError.exit_code,
)  # with which a rank ends that autopar refused something
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

DeviceKind = Literal["cpu", "cuda"]


def require_launcher() -> None:
    """Raise InputError in a process that nobody started as a rank."""
    os.environ.update(torchrun_variables(os.environ))
    if dist.is_initialized() or "RANK" in os.environ:
        return
    raise InputError(
        where="parallelize",
        found="no process group and no launcher",
        wanted="one process for each device",
        remedy="put the code into a script and start it with `autopar run SCRIPT --cluster local:4`, "
        "torchrun or srun; plan() works here",
    )


def init(
    device_kind: DeviceKind = "cpu",
    timeout: float = PROCESS_GROUP_TIMEOUT,
    *,
    meet: Callable[[timedelta], dict[str, Any]] | None = None,
) -> None:
    """Join the process group: gloo on CPUs, NCCL on the GPU of LOCAL_RANK; nothing if already joined.

    A collective that waits longer than `timeout` seconds for its peers raises. `meet` gives another store,
    rank and size than the launcher's, of a world that is a part of its.
    """
    if dist.is_initialized():
        return
    os.environ.update(torchrun_variables(os.environ))
    if "RANK" not in os.environ:
        raise InputError(
            where="process group",
            found="no RANK in the environment",
            wanted="a process started by a launcher",
            remedy="start it with `autopar run SCRIPT --cluster local:4`, torchrun or srun",
        )
    if dist.is_torchelastic_launched():
        guard(os.getppid())
    rank_files.mark(rank_files.JOINING)
    limit = timedelta(seconds=timeout)
    keys = (meet or _own_keys)(limit)
    if device_kind == "cpu":
        dist.init_process_group("gloo", timeout=limit, **keys)
    else:
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device, **keys)
    rank_files.mark(rank_files.JOINED)


def launched_store(limit: timedelta) -> tuple[Any, int, int]:
    """The launcher's store, with keys of this start alone, this process' rank, and how many there are."""
    store, rank, size = next(rendezvous("env://", timeout=limit))
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") or "0"
    return PrefixStore(f"autopar/start_{count}", store), rank, size


def _own_keys(limit: timedelta) -> dict[str, Any]:
    """A store with keys of this start alone, for the process group of a world that torchrun starts again.

    Torchrun of one node keeps its store, with the addresses of ranks that have died: ranks that found them
    waited for ever, or were refused.
    """
    count, nodes = (os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"))
    if count in ("", "0") or nodes != "1":
        return {}
    store, rank, size = launched_store(limit)
    return {"store": store, "rank": rank, "world_size": size}


def local_rank() -> int:
    """The number of this rank among those of its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, however it ends (Linux only)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel knew of our wish
        os.kill(os.getpid(), signal.SIGKILL)


def guard(parent: int) -> None:
    """Let this rank end with `parent`, leave its process group, and end at once when it raises."""
    die_with_parent(parent)
    atexit.register(leave)
    sys.excepthook = _raised


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(SETTLE)


def end(code: int) -> NoReturn:
    """End without the interpreter's own ending, which may wait for collectives."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever ends needs no more of it
    late = threading.Timer(TIDY_SECONDS, os._exit, (code,))
    late.daemon = True
    late.start()
    atexit.unregister(leave)
    with suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001  (Python's)
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Write out what the user's open files hold."""
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(BaseException):
                each.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()


def fail(error: AutoparError) -> NoReturn:
    """End this rank with an error, from a thread beside a call that waits for ever."""
    print(f"autopar: {error}", file=sys.stderr, flush=True)
    if LAUNCHER in os.environ and rank_files.ERROR_FILE in os.environ:
        try:
            raise error
        except AutoparError as raised:
            _LastWords().record_exception(raised)
    time.sleep(LINGER)
    end(error.exit_code)


def _raised(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> NoReturn:
    lines = "".join(format_exception(kind, error, traceback)).splitlines()
    prefix = f"[rank{os.environ.get('RANK', '')}]: "
    stream = sys.__stderr__ or sys.stderr  # torch's hook, which calls this one, buffers
    print("\n".join(prefix + line for line in lines), file=stream, flush=True)
    time.sleep(LINGER)
    end(1)


class _LastWords(ErrorHandler):
    """Leaves the traceback to the launcher, which prints it once, and ends the rank.

    The launcher may end the rank at any moment because of another's failure, so it finds the whole traceback
    or none: a part of it would fail the launcher.
    """

    def record_exception(self, e: BaseException) -> NoReturn:
        path = os.environ[rank_files.ERROR_FILE]
        os.environ[rank_files.ERROR_FILE] = draft = f"{path}.draft"
        if isinstance(e, AutoparError) and e.exit_code in REFUSED:
            _leave_users_frames(e)
        super().record_exception(e)
        if (ended := getattr(e, "ended", None)) is not None:
            _add(Path(draft), ended)
        os.replace(draft, path)
        time.sleep(LINGER)
        end(e.exit_code if isinstance(e, AutoparError) else 1)


def _add(draft: Path, ended: int) -> None:
    """Let the launcher know which rank has ended before."""
    told = json.loads(draft.read_text())
    told["message"]["extraInfo"][ENDED] = ended
    draft.write_text(json.dumps(told))


def _leave_users_frames(error: AutoparError) -> None:
    """Cut autopar's and torch's frames out of the tracebacks of a refusal and its causes."""
    links: BaseException | None = error
    while links is not None:
        links.with_traceback(_users(links.__traceback__))
        links = links.__cause__ or (None if links.__suppress_context__ else links.__context__)


def _users(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of what all models run on; its last one if there is no other."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    rest = None
    for each in reversed([frame for frame in frames if not _is_tools(frame)] or frames[-1:]):
        rest = TracebackType(rest, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rest


def _is_tools(traceback: TracebackType) -> bool:
    return is_tool(traceback.tb_frame.f_code.co_filename)


def run(script: str) -> None:
    """Run `script` as the main program; sys.argv is its own already."""
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        end(128 + signal.SIGINT)
    except SystemExit as ended:
        if code := _exit_code(ended):
            end(code)
    rank_files.mark(rank_files.ENDED)


def _exit_code(ended: SystemExit) -> int:
    """Exit code that Python derives from sys.exit's argument: nothing, a number, or a last message."""
    match ended.code:
        case None:
            return 0
        case int(code):
            return code & 0xFF
        case message:
            print(message, file=sys.stderr)
            return 1


def main() -> None:
    """Run the script that the command line names; the exit code is the script's own."""
    guard(int(os.environ[LAUNCHER]))
    rank_files.answer_where()
    flight_record.begin_record()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `autopar.runtime` has set it for its imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Lines leave whole, and at once: a killed rank must not lose its last ones.
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.argv = sys.argv[1:]
    record(run, _LastWords())(sys.argv[0])
