"""Files by which a rank tells its launcher where it is, beside torch's own for its traceback.

    joining, joined    it has come to the start of the process group, and past it
    ended              its script has come to a good end
    stack              the lines in which it is, written when the launcher asks by a signal

A rank that waits in a library's code hears no handler written in Python, but faulthandler's, which is in C.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from autopar.trace.call.user_source import is_library, shown_path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the environment variable that says where torch writes the traceback
JOINING, JOINED, ENDED, STACK = "joining", "joined", "ended", "stack"
ASKING = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None  # that no library is known to use
ANSWER_SECONDS, WRITING_SECONDS = 3.0, 0.1  # in which ranks begin to write where they are, and end
_FRAME = re.compile(r'File "(.+)", line (\d+) in')


# -- on a rank ------------------------------------------------------------------------------------


def mark(name: str) -> None:
    """Tell the launcher that this rank has come so far; nothing without one of ours."""
    folder = own_folder()
    if folder is not None:
        with suppress(OSError):
            (folder / name).touch()


def answer_where() -> None:
    """Write this rank's lines whenever the launcher asks."""
    folder = own_folder()
    if folder is not None and ASKING is not None:
        with suppress(OSError):
            file = (folder / STACK).open("w")
            faulthandler.register(ASKING, file=file, all_threads=False)


def own_folder() -> Path | None:
    """The folder of this rank's files, None without a launcher."""
    path = os.environ.get(ERROR_FILE)
    return Path(path).parent if path else None


# -- in the launcher --------------------------------------------------------------------------------


def where_are(logs: Path, pids: Iterable[int]) -> str:
    """The line of the user's code in which each of these ranks is, as a clause; empty if none says so."""
    asked = sum(_asks(pid) for pid in pids)
    deadline = time.monotonic() + ANSWER_SECONDS
    while len(_lines(logs)) < asked and time.monotonic() < deadline:
        time.sleep(WRITING_SECONDS)
    time.sleep(WRITING_SECONDS if asked else 0.0)
    lines = _lines(logs)
    return ", ".join(f"rank {rank} in {lines[rank]}" for rank in sorted(lines, key=int))


def _asks(pid: int) -> bool:
    """Ask a rank where it is; false if it doesn't listen."""
    if ASKING is not None and listens(pid, ASKING):
        with suppress(ProcessLookupError):
            os.kill(pid, ASKING)
            return True
    return False


def _lines(logs: Path) -> dict[str, str]:
    return {path.parent.name: line for path in logs.glob(f"*/*/*/{STACK}") if (line := _line(path))}


def listens(pid: int, number: int) -> bool:
    """Whether the process handles the signal, which would end it otherwise."""
    with suppress(OSError, StopIteration, ValueError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def _line(path: Path) -> str:
    """The innermost line of the user's own in a stack, and the innermost one if there is none of theirs."""
    with suppress(OSError):
        frames = _FRAME.findall(path.read_text(errors="replace"))
        users = [frame for frame in frames if not is_library(frame[0])]
        for file, line in (users or frames)[:1]:
            return f"{shown_path(file)}:{line}"
    return ""


def never_joined(logs: Path) -> str | None:
    """A rank that has ended well and never joined the process group, if another waits in its start."""
    joining, joined, ended = (
        {path.parent.name for path in logs.glob(f"*/*/*/{name}")} for name in (JOINING, JOINED, ENDED)
    )
    absent = sorted(ended - joined)
    return absent[0] if absent and joining - joined - ended else None
