"""Processes that measure along where one plans by itself, so that the node is as busy as in a step.

    this process   a plan by estimates ── portion ── portion ── solve ── portion ── plan
    neighbour                             portion    portion             portion      ends

They start with the first portion and are told what is measured by a pipe each. A neighbour that dies ends
nothing: its core is free then, as if the machine had none.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

import torch.distributed as dist

from autopar.cluster import ClusterSpec
from autopar.core.graph import Call
from autopar.cost.machine.measuring import CoRunners, measure_portion
from autopar.cost.machine.model import co_running, setting_of
from autopar.planning.agree import packed, unpacked

READY = b"!"
BUSY = 0.5  # other processes a core, from which on measurements are noted as slow
Process = subprocess.Popen[bytes]


def load_of_others() -> float:
    """Processes that ran or waited for each core over the last minute, before this one does its work."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def load_notes(load: float) -> tuple[str, ...]:
    """A note on a machine whose cores others kept busy by that load before anything was measured."""
    if load < BUSY:
        return ()
    return (
        f"this machine was busy with {load:.1f} other processes a core: what was measured meanwhile is "
        "slower than on a quiet one, where another database can be measured (--costdb)",
    )


@contextmanager
def busy_neighbours(cluster: ClusterSpec, *, wanted: bool) -> Iterator[CoRunners | None]:
    """Within, a function that makes a node's other processes measure along. None where there are none, or
    where other ranks do so."""
    count = co_running(cluster) - 1
    launched = dist.is_available() and dist.is_initialized()
    if not wanted or cluster.device_type != "cpu" or count < 1 or launched:
        yield None
        return
    neighbours = _Neighbours(count, setting_of(cluster).threads)
    try:
        yield neighbours.measure
    finally:
        neighbours.end()


@dataclass(slots=True)
class _Neighbours:
    count: int
    threads: int
    processes: list[Process] = field(default_factory=list)

    def measure(self, calls: list[Call]) -> None:
        """Begin to measure these calls in every neighbour."""
        if not self.processes:
            self.start()
        for process in self.processes:
            assert process.stdin is not None
            with suppress(OSError):  # it has died
                pickle.dump([packed(call) for call in calls], process.stdin)
                process.stdin.flush()

    def start(self) -> None:
        """Start them, and wait until all have imported what they need."""
        words = [sys.executable, "-m", __name__, str(self.threads)]
        pipe = subprocess.PIPE
        self.processes = [subprocess.Popen(words, stdin=pipe, stdout=pipe) for _ in range(self.count)]
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.read(len(READY))

    def end(self) -> None:
        """Kill the processes; measurements that still run are lost."""
        for process in self.processes:
            process.kill()
            with suppress(OSError), process:  # closes the pipes, what it hasn't read is lost, and waits
                pass


def serve(portions: IO[bytes], threads: int) -> None:
    """Measure portions of calls until the stream ends."""
    while True:
        try:
            calls: list[Any] = pickle.load(portions)
        except EOFError:
            return
        measure_portion([unpacked(each) for each in calls], threads, "cpu")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for who plans, and ends this one
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    serve(sys.stdin.buffer, int(sys.argv[1]))
