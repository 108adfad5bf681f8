"""Says where ranks wait for each other, and ends them where they never meet.

Calls that are collective are numbered. A thread beside them tells the others through the store of the process
group, once a second and only what is new, so that a call itself costs little:

    rank 0   4 forward   5 state_dict ----- waits -----.
    rank 1   4 forward   5 forward    6 forward        '-> call 5 is another one on rank 1: an error

A rank that has waited long in a call which another one has not come to says so, once. The line of a call is
found by the thread that makes it: to read the frames of another, which goes on meanwhile, may crash Python.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.launch import worker
from autopar.trace.user_source import is_library, shown_path

TICK = 1.0  # seconds
PATIENCE = 5.0  # seconds in a call before the others are looked at
LONG = 30.0  # seconds in a call before the rank says so
REMEMBERED = 32  # calls
KEY = "autopar/roll_call/{rank}"


class Call(NamedTuple):
    """A collective call, and the line of the user's code that makes it."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"

    @property
    def place(self) -> str:
        """File and line, as errors show them."""
        return f"{shown_path(self.file)}:{self.line}" if self.file else "outside of user code"


class RollCall:
    """The collective calls of this rank, and what is known of the others."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._store = self._store.clone() if hasattr(self._store, "clone") else self._store
        self._main = threading.get_ident()
        self._number, self._calls = 0, dict[int, Call]()
        self._since: float | None = None  # when the call was entered that this rank is in
        self._told = ""
        self._warned = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autopar roll call", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def enter(self, name: str) -> None:
        """Begin the next call."""
        number = self._number + 1
        self._calls[number] = Call(name, *_user_line())
        self._calls.pop(number - REMEMBERED, None)
        self._number = number  # once the thread beside finds its call
        self._since = time.monotonic()

    def go_on(self, how: str) -> None:
        """The call of this rank is of another kind than its name alone says."""
        call = self._calls[self._number]
        self._calls[self._number] = call._replace(name=f"{call.name}, {how}")

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
            "calls": {str(number): call for number, call in list(self._calls.items())},
            "ended": ended,
        }
        text = json.dumps(state)
        if text != self._told:
            self._store.set(KEY.format(rank=self._rank), text)
            self._told = text

    def _look(self, number: int, waited: float) -> None:
        """Compare the call that this rank waits in with those of the others."""
        mine, absent = self._calls[number], []
        for rank in range(self._size):
            key = KEY.format(rank=rank)
            if rank == self._rank or not self._store.check([key]):
                continue
            other = json.loads(self._store.get(key))
            calls = {int(at): Call(*call) for at, call in other["calls"].items()}
            theirs = calls.get(number)
            if theirs is not None and theirs.name != mine.name:
                self._fail(mine, f"rank {rank} made another call instead, {theirs}")
            if other["ended"] and other["number"] < number:
                self._fail(mine, f"rank {rank} has ended")
            if other["number"] < number:
                absent.append(f"rank {rank} was last in {calls.get(other['number'], 'no call')}")
        if absent and waited > LONG and self._warned != number and self._number == number:
            self._warned = number
            where = f"rank {self._rank} has waited {waited:.0f} s in {mine}"
            print(f"autopar: {where}: {', '.join(absent)}", file=sys.stderr, flush=True)

    def _fail(self, call: Call, found: str) -> None:
        if self._over.is_set() or not self.is_inside:
            return
        self._over.set()
        worker.fail(
            InputError(
                where=f"{call.name} on rank {self._rank} ({call.place})",
                found=found,
                wanted="the same collective calls on all ranks",
                remedy="call state_dict, and whatever reads sharded tensors, on every rank, and save on one; "
                "change what forward reads on every rank alike",
            )
        )


def _user_line() -> tuple[str, int]:
    """File and line of the user's own code that this thread is in; an empty file where it is in none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


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
