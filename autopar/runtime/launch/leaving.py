"""A signal asks a rank to leave: it does so at a step's border, once all have saved.

    SIGTERM or SIGUSR1  -->  a flag here  --border-->  a save of all ranks  -->  exit code 75

Clusters that take a machine back send one of them some seconds before, to the launcher or to ranks.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

LEFT = 75  # exit code of a run that has saved and left: EX_TEMPFAIL of sysexits.h, try again later
LEAVE_SECONDS = 30.0  # in which ranks save and leave; as SLURM and Kubernetes give before they kill
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class LeaveRequest:
    """Within, a signal that asks to leave is noted instead of ending the process; outside of the main thread
    none is."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> LeaveRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in LEAVE_SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        leaves = isinstance(error, SystemExit) and error.code == LEFT  # and needs no more of them
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if leaves else handler or signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)


def leave_run() -> NoReturn:
    """End this rank as one that has saved and is to be started again."""
    sys.exit(LEFT)
