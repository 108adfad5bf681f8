"""The ranks that a launcher has started, as the kernel knows them."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.tail_log import TailLog


def children() -> set[int]:
    """The ranks, of this launch and others, whose parent is this process."""
    found = set()
    for child in processes():
        with suppress(OSError):  # it ended meanwhile
            if b"autopar.runtime" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(int(child))
    return found


def processes() -> list[str]:
    """The processes whose parent is this one, by threads. One that ends meanwhile leaves its own to another,
    and all are asked anew. None where the kernel doesn't say."""
    while Path("/proc/thread-self/children").exists():
        with suppress(FileNotFoundError, ProcessLookupError):
            threads = os.listdir("/proc/self/task")
            lists = [Path(f"/proc/self/task/{thread}/children").read_text() for thread in threads]
            return [child for each in lists for child in each.split()]
    return []


def end_all_but(others: set[int]) -> None:
    """End ranks of which the agent doesn't know: a signal may come while it starts them.

    The kernel's list of children can leave some out while others end, so it is read until it has none.
    """
    while ranks := children() - others:
        for rank in ranks:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(rank, signal.SIGKILL)
                os.waitpid(rank, 0)


def end_tails() -> None:
    """End threads that pass on the lines of such ranks: without the agent they would wait for more for ever,
    and the interpreter for them."""
    for each in gc.get_objects():
        if type(each) is TailLog and not each.stopped():
            each.stop()
