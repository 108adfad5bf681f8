"""A pool of gloo workers that stays warm across the test session.

`pool.run(function, *args)` calls a module-level function on every rank and returns their results in
rank order. A rank that raises fails the call with its traceback; a call that hangs, or a rank that
dies, ends all workers, and the next call starts new ones. Workers die with the test process.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 60.0  # seconds for one call
GRACE = 2.0  # seconds that the other ranks have after one has raised
PR_SET_PDEATHSIG = 1  # linux/prctl.h

# One server imports torch once; the workers are forked from it before it has started threads.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "autopar.api"])


class PoolError(AssertionError):
    """A call on the workers failed."""


class Pool:
    """`size` gloo workers of one thread each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(message)
        return self._results(timeout)

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(theirs, rank, self.size, port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _results(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.size:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in results | failures}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                passed, value = _receive(connection)  # type: ignore[arg-type]
                (results if passed else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
            if not ready:
                break
        silent = sorted(set(range(self.size)) - set(results) - set(failures))
        if silent or failures:
            self.close()
            raise PoolError(
                "".join(f"\nrank {rank} of {self.size}:\n{text}" for rank, text in failures.items())
                + (f"\nranks {silent} gave no answer in time" if silent else "")
            )
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _receive(connection: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(connection.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        return False, "the process died"


def _work(connection: Connection, rank: int, size: int, port: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # as the tests do with what they have imported
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:  # the test session is over
            os._exit(0)
        connection.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    import torch

    try:
        function, args = pickle.loads(message)
        torch.manual_seed(0)  # whatever ranks have drawn before
        return pickle.dumps((True, function(*args)))
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
