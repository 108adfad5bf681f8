"""Ranks as processes: who they are, and whether the kernel has stopped them.

A rank that is stopped (SIGSTOP, a terminal's Ctrl-Z) keeps its sockets and ends no collective: the others
would wait as long as they wait for a slow one, ten minutes by default.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STOPPED_SECONDS = 45.0  # in which a person may let a rank go on; with some of grace, a minute until all end


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank of the world, `space` being the namespace that its pid is of."""

    rank: int | str
    pid: int
    host: str
    space: str

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def own_process(rank: int) -> RankProcess:
    """The calling process, which is a `rank`."""
    return RankProcess(rank, os.getpid(), socket.gethostname(), _space())


def process_of(pid: int) -> RankProcess:
    """The process of a rank which this process has started."""
    rank = "?"
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = next((item[5:].decode() for item in variables if item.startswith(b"RANK=")), "?")
    return RankProcess(rank, pid, socket.gethostname(), _space())


def is_stopped(process: RankProcess) -> bool:
    """Whether a signal, not a debugger, has stopped the process. False if the process is in another
    namespace."""
    if process.space != _space():
        return False
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[:1] == ["T"]
    return False


def _space() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
