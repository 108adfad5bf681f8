"""Progress on stderr: a bar on a terminal, else a line every so often."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 10.0


@dataclass(slots=True)
class ProgressLines:
    """Writes "autopar: 12 of 80, aten.conv2d.default" if the last line is `SECONDS_BETWEEN_LINES` old."""

    last: float

    @classmethod
    def begun(cls) -> ProgressLines:
        """Lines from now on: what takes less time than one of them writes none."""
        return cls(time.monotonic())

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            count = f"measuring {done} of {total}: " if total else ""
            print(f"autopar: {count}{what}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class ProgressBar:
    """Shows "done of total" while `shown()`; nothing at any other time. Can be sent to a worker.

    A bar where stderr is a terminal or it is `wanted`, else lines.
    """

    wanted: bool = False
    _shown: tuple[Progress, TaskID] | ProgressLines | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if isinstance(self._shown, ProgressLines):
            self._shown(done, total, what)
        elif self._shown:
            progress, task = self._shown
            progress.update(task, description=what)
            if total:
                progress.update(task, completed=done, total=total)

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not (self.wanted or sys.stderr.isatty()):
            self._shown = ProgressLines.begun()
            try:
                yield
            finally:
                self._shown = None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            self._shown = (progress, progress.add_task("measuring", total=None))
            try:
                yield
            finally:
                self._shown = None
