"""A progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@dataclass(slots=True)
class ProgressBar:
    """Shows "done of total" while `shown()`; nothing at any other time. Can be sent to a worker.

    By default only where stderr is a terminal; `wanted` shows it anyway.
    """

    wanted: bool = False
    _shown: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._shown:
            progress, task = self._shown
            progress.update(task, completed=done, total=total, description=what)

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not (self.wanted or sys.stderr.isatty()):
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            self._shown = (progress, progress.add_task("measuring", total=None))
            try:
                yield
            finally:
                self._shown = None
