"""Beside the ranks of a launcher: a thread that has their orders planned by a process of low priority.

rank 0 ── order ──> thread of the launcher ──> ahead, niced ──> plans in the book
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from autopar.core.elastic_bounds import Elastic
from autopar.planning.book.book import BOOK, default_folder
from autopar.planning.book.orders import ORDERS, SUFFIX
from autopar.planning.book.other_worlds import WORLDS

LOOK_SECONDS = 1.0  # between two looks for orders
NICENESS = 10  # a tenth of a rank's share of a core that both want (Linux: 1.25 for each step)


@contextmanager
def planning_ahead(bounds: Elastic) -> Iterator[dict[str, str]]:
    """Within, orders of ranks are planned; gives the environment variables that have them ordered.

    None where AUTOPAR_BOOK is empty.
    """
    named = os.environ.get(BOOK)
    if named == "":
        yield {}
        return
    folder = Path(named) if named else default_folder()
    with tempfile.TemporaryDirectory(prefix="autopar-orders-") as orders:
        over = threading.Event()
        words = (Path(orders), over, dict(os.environ))  # which launches change for their ranks
        thread = threading.Thread(target=_serve, args=words, name="autopar-ahead")
        thread.start()
        try:
            yield {BOOK: str(folder.absolute()), ORDERS: orders, WORLDS: f"{bounds.least}:{bounds.most}"}
        finally:
            over.set()
            thread.join()


def _serve(folder: Path, over: threading.Event, variables: Mapping[str, str]) -> None:
    """Have orders planned until it is over, one after the other."""
    while not over.wait(LOOK_SECONDS):
        order = min(folder.glob(f"*{SUFFIX}"), default=None)
        if order is not None:
            _plan(order, over, variables)
            order.unlink(missing_ok=True)


def _plan(order: Path, over: threading.Event, variables: Mapping[str, str]) -> None:
    """Have one order planned, or end that where it is over."""
    command = [sys.executable, "-m", "autopar.planning.ahead", str(order), str(os.getpid())]
    none = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=none, stdout=none, env=variables, start_new_session=True) as made:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, made.pid, NICENESS)
        while made.poll() is None:
            if over.wait(LOOK_SECONDS):
                made.kill()
                made.wait()
