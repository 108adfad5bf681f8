"""Progress in a notebook: a bar of HTML that is redrawn in its place, and goes when the work is done.

    [=======>       ]  12 of 80: aten.conv2d.default

Where workers do the work, their progress comes through a file, which the notebook's process reads:

    rank 0 ── RelayedBar ──> progress.json ──> NotebookBar

Outside of notebooks nothing is shown, and where somebody listens to progress, that is told alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, TypeVar

Listener = Callable[[int, int, str], None]  # done, of how many, what
B = TypeVar("B")
SECONDS_BETWEEN_PICTURES = 0.2


@dataclass(slots=True)
class NotebookBar:
    """Redraws the bar by its `handle`, which is IPython's, at most every so often."""

    handle: Any
    last: float = 0.0

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_PICTURES:
            self.last = now
            self.draw(bar_html(done, total, what))

    def draw(self, html: str) -> None:
        self.handle.update({"text/html": html, "text/plain": ""}, raw=True)


def bar_html(done: int, total: int, what: str) -> str:
    """The bar; without a `total` it says that something goes on."""
    known = f' max="{total}" value="{done}"' if total else ""
    count = f"{done} of {total}: " if total else ""
    return f"<progress{known}></progress> {count}{escape(what)}"


@contextmanager
def notebook_bar(listener: Listener | None) -> Iterator[Listener | None]:
    """The listener, or where there is none, in a notebook, a bar that is shown meanwhile."""
    shell = _shell()
    if listener is not None or shell is None:
        yield listener
        return
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

    first = {"text/html": bar_html(0, 0, "planning"), "text/plain": ""}
    bar = NotebookBar(display(first, raw=True, display_id=True))
    try:
        yield bar
    finally:
        bar.draw("")


@dataclass(slots=True)
class RelayedBar:
    """Writes progress to a file, at most once in `SECONDS_BETWEEN_PICTURES`, from whatever process has the
    bar."""

    path: Path
    last: float = 0.0

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_PICTURES:
            self.last = now
            draft = self.path.with_suffix(".part")
            with suppress(OSError):  # the folder goes when nobody waits any more
                draft.write_text(json.dumps([done, total, what]), encoding="utf-8")
                draft.replace(self.path)

    def shown(self) -> nullcontext[None]:
        """A context that shows nothing: whoever reads the file shows the bar."""
        return nullcontext()

    def read(self) -> tuple[int, int, str] | None:
        """The last progress that was written; None if none was."""
        if not self.path.exists():
            return None
        done, total, what = json.loads(self.path.read_text(encoding="utf-8"))
        return done, total, what


@contextmanager
def notebook_bar_of_workers(bar: B | None) -> Iterator[B | RelayedBar | None]:
    """The bar, or where there is none, in a notebook, one that can be sent to workers."""
    if bar is not None or _shell() is None:
        yield bar
        return
    ended = Event()
    with notebook_bar(None) as shown, TemporaryDirectory() as folder:
        assert shown is not None
        relayed = RelayedBar(Path(folder, "progress.json"))
        reader = Thread(target=copy_context().run, args=(_relay, relayed, shown, ended))
        reader.start()
        try:
            yield relayed
        finally:
            ended.set()
            reader.join()


def _relay(relayed: RelayedBar, shown: Listener, ended: Event) -> None:
    """Draw what is told until all has ended."""
    before = None
    while not ended.wait(SECONDS_BETWEEN_PICTURES):
        told = relayed.read()
        if told is not None and told != before:
            shown(*told)
        before = told


def _shell() -> Any:
    """IPython's shell, if it belongs to a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if getattr(shell, "kernel", None) is not None else None
