"""Progress in a notebook: a bar of HTML that is redrawn in its place, and goes when the work is done.

    [=======>       ]  12 of 80: aten.conv2d.default

Outside of notebooks nothing is shown, and where somebody listens to progress, that is told alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

Listener = Callable[[int, int, str], None]  # done, of how many, what
EVERY = 0.2  # seconds between two pictures


@dataclass(slots=True)
class NotebookBar:
    """Redraws the bar by its `handle`, which is IPython's, at most every so often."""

    handle: Any
    last: float = 0.0

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self.last >= EVERY:
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


def _shell() -> Any:
    """IPython's shell, if it belongs to a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if getattr(shell, "kernel", None) is not None else None
