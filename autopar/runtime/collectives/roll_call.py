"""Says where ranks wait for each other, and ends them where they never meet.

Calls that are collective are numbered. A thread beside them tells the others through the store of the process
group, once a second and only what is new, so that a call itself costs nothing:

    rank 0   4 forward   5 state_dict ----- waits -----.
    rank 1   4 forward   5 forward    6 forward        '-> call 5 is another one on rank 1: an error

A rank that has waited long in a call which another one has not come to says so, once.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.launch import worker
from autopar.trace.user_source import is_library, shown_path

TICK = 1.0  # seconds
PATIENCE = 5.0  # seconds in a call before the others are looked at
LONG = 30.0  # seconds in a call before the rank says so
REMEMBERED = 32  # calls
KEY = "autopar/roll_call/{rank}"


class RollCall:
    """The collective calls of this rank, and what is known of the others."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._store = self._store.clone() if hasattr(self._store, "clone") else self._store
        self._main = threading.get_ident()
        self._number, self._names = 0, dict[int, str]()
        self._since: float | None = None  # when the call was entered that this rank is in
        self._told = ""
        self._warned = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autopar roll call", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def enter(self, name: str) -> None:
        """Begin the next call."""
        self._number += 1
        self._names[self._number] = name
        self._names.pop(self._number - REMEMBERED, None)
        self._since = time.monotonic()

    def go_on(self, how: str) -> None:
        """The call of this rank is of another kind than its name alone says."""
        self._names[self._number] += f", {how}"

    def leave(self) -> None:
        """Be outside of calls again."""
        self._since = None

    @property
    def is_inside(self) -> bool:
        """Whether this rank is in a call."""
        return self._since is not None

    def end(self) -> None:
        """Tell the others that this rank has come to its end."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(2 * TICK)
        try:
            self._tell(ended=True)
        except RuntimeError:  # the rank that holds the store has ended before
            return

    # -- beside the calls -----------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            try:
                self._tell()
                since, number = self._since, self._number
                waited = 0.0 if since is None else time.monotonic() - since
                if waited > PATIENCE:
                    self._look(number, waited)
            except RuntimeError:  # the store has ended with its rank, and the launcher ends the others
                return

    def _tell(self, *, ended: bool = False) -> None:
        state = {
            "number": self._number,
            "names": {str(number): name for number, name in list(self._names.items())},
            "inside": self.is_inside,
            "line": self._line(),
            "ended": ended,
        }
        text = json.dumps(state)
        if text != self._told:
            self._store.set(KEY.format(rank=self._rank), text)
            self._told = text

    def _look(self, number: int, waited: float) -> None:
        """Compare the call that this rank waits in with those of the others."""
        name, absent = self._names[number], []
        for rank in range(self._size):
            key = KEY.format(rank=rank)
            if rank == self._rank or not self._store.check([key]):
                continue
            other = json.loads(self._store.get(key))
            theirs = other["names"].get(str(number))
            if theirs is not None and theirs != name:
                self._fail(name, f"rank {rank} made another call instead, {theirs} ({other['line']})")
            if other["ended"] and other["number"] < number:
                self._fail(name, f"rank {rank} has ended")
            if other["number"] < number:
                absent.append(f"rank {rank} is at {other['line']}")
        if absent and waited > LONG and self._warned != number and self._number == number:
            self._warned = number
            where = f"rank {self._rank} has waited {waited:.0f} s in {name} ({self._line()})"
            print(f"autopar: {where}: {', '.join(absent)}", file=sys.stderr, flush=True)

    def _fail(self, name: str, found: str) -> None:
        if self._over.is_set() or not self.is_inside:
            return
        self._over.set()
        worker.fail(
            InputError(
                where=f"{name} on rank {self._rank} ({self._line()})",
                found=found,
                wanted="the same collective calls on all ranks",
                remedy="call state_dict, and whatever reads sharded tensors, on every rank, and save on one; "
                "change what forward reads on every rank alike",
            )
        )

    def _line(self) -> str:
        """Where the main thread is, in the user's own code."""
        for frame, number in traceback.walk_stack(sys._current_frames().get(self._main)):
            if not is_library(frame.f_code.co_filename):
                return f"{shown_path(frame.f_code.co_filename)}:{number}"
        return "its end"


_current: RollCall | None = None


@contextmanager
def collective(name: str) -> Iterator[None]:
    """Around a call that all ranks make, or none; a call inside another one is a part of it."""
    global _current
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1:
        yield
        return
    if _current is not None and _current.world is not world:
        _current.end()
        _current = None
    _current = _current or RollCall(world)
    if _current.is_inside or threading.get_ident() != _current._main:
        yield
        return
    _current.enter(name)
    try:
        yield
    finally:
        _current.leave()


def go_on(how: str) -> None:
    """Say what the collective call that this rank is in does, which all ranks must do in it."""
    if _current is not None and _current.is_inside and threading.get_ident() == _current._main:
        _current.go_on(how)
