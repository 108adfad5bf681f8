"""Several hosts on one machine: Linux network namespaces behind one switch, with links of a given rate.

    switch      p0   p1   p2   p3        a bridge in a namespace of its own
                |    |    |    |         veth pairs; at both ends of each a token bucket
    hosts      net0 net0 net0 net0       10.77.0.1, .2, .3, .4; no other way out

A host sends at most at `rate`, and receives at most at it. All interfaces lie in the namespaces, so the
machine's own network never sees them, and they are gone with the namespaces. Those go when the block
ends, also by an error, ctrl-C, a hang-up or a termination; a kill leaves them to the next who comes.
The hosts share cores and memory: they are apart in their network only.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from autopar.errors import InputError, WorkerError
from autopar.runtime.launch import call_main, worker

Result = TypeVar("Result")

PREFIX = "autopar-hosts"
INTERFACE = "net0"
PORT = 29500  # of the rendezvous; host 0's ports are its own
BURST = 32 << 10  # bytes that may pass at once: 1.3 ms at 200 Mbit/s
QUEUE_SECONDS = 0.05  # what waits longer in a bucket is dropped, as by a router
POLL_SECONDS = 0.05
GRACE = 5.0  # seconds that ranks have to end by themselves when one has failed
DEADLY = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with an address on the hosts' common network."""

    namespace: str
    address: str


def obstacle() -> str | None:
    """Why hosts can't be made here, None if they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing:
        return f"no {' and no '.join(missing)}: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces take root: run this as root, or under `unshare --user --net --mount -r`"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "delete", name)
    except InputError as error:
        return f"network namespaces don't work here: {error.found}"
    return None


@contextmanager
def hosts(count: int, *, rate: str | None) -> Iterator[tuple[Host, ...]]:
    """`count` hosts whose links carry `rate` each way, in tc's words ("200mbit"), None for all they can.

    Raises InputError where hosts can't be made. Enter it in the main thread.
    """
    if reason := obstacle():
        raise InputError(
            where="hosts", found=reason, wanted="network namespaces", remedy="use a machine that has them"
        )
    _remove_stale()
    found = tuple(
        Host(f"{PREFIX}-{os.getpid()}-{number}", f"10.77.0.{number + 1}") for number in range(count)
    )
    switch = f"{PREFIX}-{os.getpid()}-switch"
    with _ending_by_exception():
        try:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for number, host in enumerate(found):
                _connect(host, switch, f"p{number}", rate)
            yield found
        finally:
            _remove([*(host.namespace for host in found), switch])


def run_on_hosts(
    function: Callable[..., Result],
    on: Sequence[Host],
    *arguments: object,
    environment: dict[str, str] | None = None,
) -> list[Result]:
    """Call `function(*arguments)` in one process on each host; the results, host 0 first.

    The processes find each other as under torchrun, one on each node. Function, arguments and results
    are pickled; what the processes print goes to stderr. Raises WorkerError for the rank that failed
    first; all processes have ended when this returns.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        (folder / call_main.CALL).write_bytes(pickle.dumps(sys.path) + pickle.dumps((function, arguments)))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(len(on)):
                processes.append(_start(folder, on, rank, environment or {}))
            _wait(processes, folder)
        finally:
            _end(processes)
        return [
            pickle.loads((folder / call_main.RESULT.format(rank=rank)).read_bytes())
            for rank in range(len(on))
        ]


# -- making and removing ---------------------------------------------------------------------------------


def _connect(host: Host, switch: str, port: str, rate: str | None) -> None:
    inside = ("ip", "-n", host.namespace)
    _run("ip", "netns", "add", host.namespace)
    pair = ("type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
    _run("ip", "-n", switch, "link", "add", port, *pair)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run(*inside, "link", "set", INTERFACE, "up")
    _run(*inside, "link", "set", "lo", "up")
    if rate is not None:
        limit = ("root", "tbf", "rate", rate, "burst", str(BURST), "latency", f"{QUEUE_SECONDS}s")
        _run("tc", "-n", host.namespace, "qdisc", "add", "dev", INTERFACE, *limit)
        _run("tc", "-n", switch, "qdisc", "add", "dev", port, *limit)


def _remove(namespaces: Sequence[str]) -> None:
    existing = _namespaces()
    for name in namespaces:
        if name in existing:
            _run("ip", "netns", "delete", name)


def _remove_stale() -> None:
    """Those of processes that are no more."""
    made = {name: re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name) for name in _namespaces()}
    _remove([name for name, match in made.items() if match and not Path(f"/proc/{match[1]}").exists()])


def _namespaces() -> set[str]:
    return {line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(
            where=" ".join(command),
            found=done.stderr.strip() or f"exit code {done.returncode}",
            wanted="success",
            remedy="run as root on a Linux with network namespaces, veth, bridge and tbf",
        )
    return done.stdout


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Let the first deadly signal raise, so that blocks are left in order."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        for each in DEADLY:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Any] = {number: signal.signal(number, leave) for number in DEADLY}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- processes -------------------------------------------------------------------------------------------


def _start(
    folder: Path, on: Sequence[Host], rank: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    given = {
        "RANK": rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": len(on),
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": on[0].address,
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TORCHELASTIC_ERROR_FILE": _error_file(folder, rank),
        worker.LAUNCHER: os.getpid(),
    }
    command = [sys.executable, "-m", "autopar.runtime", call_main.__file__, str(folder)]
    return subprocess.Popen(  # `ip netns exec` becomes the command: the process is our own child
        ["ip", "netns", "exec", on[rank].namespace, *command],
        env=os.environ | {name: str(value) for name, value in given.items()} | environment,
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended well; WorkerError as soon as one has not."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise _failure(rank, code, _error_file(folder, rank))
        if None not in codes:
            return
        time.sleep(POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error.{rank}.json"


def _failure(rank: int, code: int, record: Path) -> WorkerError:
    found, traceback = f"exit code {code}", ""
    if record.exists():
        message = json.loads(record.read_text())["message"]
        found, traceback = message["message"], message["extraInfo"]["py_callstack"]
    return WorkerError(
        where=f"host {rank}",
        found=found,
        wanted="exit code 0",
        remedy="see its traceback",
        traceback=traceback,
    )
