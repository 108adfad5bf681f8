"""Knows each collective call by its number, and has all ranks meet before its tensors travel.

    rank 0   4 forward   5 backward of 4 --.
    rank 1   4 forward   5 forward --------+-> another call on rank 1: an error on both, with both lines

What ranks must have in common is compared there too: `compare`.

A rank may wait where others never come: in an exchange of the user's own, or at a meeting after the others'
end. So a thread beside the calls tells the others through the store of the process group, once a second
and only what is new, where this rank is. One that has waited long in a call which another one has not come
to says so, once. The line of a call is found by the thread that makes it: to read the frames of another,
which goes on meanwhile, may crash Python.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.collectives.local_sockets import PeerError
from autopar.runtime.collectives.meetings import Meetings
from autopar.runtime.collectives.statements import (
    BACKWARD,
    CollectiveCall,
    Statement,
    StatementPart,
    digest_of,
    made_another,
    other_call,
    stated,
)
from autopar.runtime.launch import worker
from autopar.runtime.launch.flight_record import note_call
from autopar.torch_seams.autograd import graph_task, queue_callback
from autopar.torch_seams.collectives import default_store
from autopar.trace.call.user_source import is_library

TICK = 1.0  # seconds
ROLL_CALL_SECONDS = 5.0  # seconds in a call before the others are looked at
LATER_SECONDS = 30.0  # in which a rank may come to where another is, within a call
WARNING_SECONDS = 30.0  # seconds in a call before the rank says so
REMEMBERED_CALLS = 32  # of which a rank tells others
KEY = "autopar/roll_call/{rank}"
TIMEOUT = timedelta(minutes=10)  # of a meeting, where no module says another
_NONE = CollectiveCall("no call", "", 0)
T = TypeVar("T")


class RollCall:
    """The collective calls of this rank, and what is known of the others."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = world
        self.meetings = Meetings.open(world, _timeout)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store: Any = default_store()
        self._store = self._store.clone() if hasattr(self._store, "clone") else self._store
        self._main = threading.get_ident()
        self._number, self._calls = 0, dict[int, CollectiveCall]()
        self._since: float | None = None  # when the call was entered that this rank is in
        self._is_backward = False  # that call
        self._told = ""
        self._warned = 0
        self._unlike: dict[int, tuple[tuple[Any, ...], float]] = {}  # names that differ, by rank: since when
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autopar roll call", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def enter(self, name: str) -> None:
        """Begin the next call."""
        number = self._number + 1
        self._calls[number] = CollectiveCall(name, *_user_line())
        self._calls.pop(number - REMEMBERED_CALLS, None)
        self._number = number  # once the thread beside finds its call
        note_call(number, str(self._calls[number]))
        self._since, self._is_backward = time.monotonic(), False

    def enter_backward(self, of: int) -> None:
        """Begin the backward of the call with this number, which ends with the engine's task."""
        forward = self._calls.get(of, _NONE)
        self.enter(f"{BACKWARD} {forward.name} {of}")
        number = self._number
        mine = self._calls[number]
        self._calls[number] = mine if mine.file else mine._replace(file=forward.file, line=forward.line)
        self._is_backward = True
        queue_callback(lambda: queue_callback(partial(self._leave_backward, number)))

    def _leave_backward(self, number: int) -> None:
        """Called last in the engine's task: sums of gradients are made by callbacks before."""
        if self._number == number:
            self.leave()

    def compare(self, parts: Sequence[StatementPart]) -> list[Statement] | None:
        """Statements of all ranks if they differ in a part, None if all agree; a collective.

        Raises InputError on every rank if some make another call.
        """
        call = self._calls.get(self._number, _NONE)
        try:
            if self.meetings.are_alike(digest_of(self._number, call, parts)):
                return None
            statements = self.meetings.everybody(stated(self._number, call, parts))
        except PeerError as lost:
            raise self._explained(lost, call) from None
        if (error := other_call(statements, self._rank)) is not None:
            raise error
        return statements

    def _explained(self, lost: PeerError, call: CollectiveCall) -> PeerError:
        """The error of a meeting to which a rank doesn't come as it has ended; else the error itself."""
        with suppress(RuntimeError):  # the store has ended with its rank
            for rank, (state, calls) in self._others().items():
                if state["ended"]:
                    return _has_ended(call, self._rank, rank, calls.get(state["number"], _NONE))
        return lost

    def meets(self) -> bool:
        """Whether ranks meet for this call; between meetings they need not compare its parts."""
        return self.meetings.is_held(self._number)

    @property
    def number(self) -> int:
        """The number of the call that this rank made last."""
        return self._number

    def go_on(self, how: str) -> None:
        """The call of this rank is of another kind than its name alone says."""
        call = self._calls[self._number]
        self._calls[self._number] = call._replace(name=f"{call.name}, {how}")

    def leave(self) -> None:
        """Be outside of calls again."""
        self._since = None

    @property
    def is_inside(self) -> bool:
        """Whether this rank is inside a collective call. A backward that raised has left its call, and is
        taken out here."""
        if self._is_backward and self.is_main and graph_task() == -1:
            self.leave()
        return self._since is not None

    @property
    def is_main(self) -> bool:
        return threading.get_ident() == self._main

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
                if waited > ROLL_CALL_SECONDS:
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
        for rank, (other, calls) in self._others().items():
            theirs = calls.get(number)
            is_other = theirs is not None and theirs.name != mine.name
            if theirs is not None and is_other and not self._may_follow(number, rank, mine, theirs):
                self._fail(made_another(mine, self._rank, rank, theirs))
            if other["ended"] and other["number"] < number:
                self._fail(_has_ended(mine, self._rank, rank, calls.get(other["number"], _NONE)))
            if other["number"] < number:
                absent.append(f"rank {rank} was last in {calls.get(other['number'], 'no call')}")
        if absent and waited > WARNING_SECONDS and self._warned != number and self._number == number:
            self._warned = number
            where = f"rank {self._rank} has waited {waited:.0f} s in {mine}"
            print(f"autopar: {where}: {', '.join(absent)}", file=sys.stderr, flush=True)

    def _may_follow(self, number: int, rank: int, mine: CollectiveCall, theirs: CollectiveCall) -> bool:
        """Whether one of two names of a call goes on as the other does, and may still become it: a rank whose
        next program takes up to LATER_SECONDS longer to make."""
        first, second = sorted((mine.name, theirs.name), key=len)
        if not second.startswith(f"{first}, "):
            return False
        names, since = self._unlike.get(rank, ((), 0.0))
        if names != (number, mine.name, theirs.name):
            self._unlike[rank] = (number, mine.name, theirs.name), time.monotonic()
            return True
        return time.monotonic() - since < LATER_SECONDS

    def _others(self) -> dict[int, tuple[dict[str, Any], dict[int, CollectiveCall]]]:
        """Reports of the other ranks, and their last calls by number."""
        found = {}
        for rank in range(self._size):
            key = KEY.format(rank=rank)
            if rank != self._rank and self._store.check([key]):
                state = json.loads(self._store.get(key))
                found[rank] = state, {int(at): CollectiveCall(*call) for at, call in state["calls"].items()}
        return found

    def _fail(self, error: AutoparError) -> None:
        if self._over.is_set() or self._since is None:
            return
        self._over.set()
        worker.fail(error)


def _has_ended(call: CollectiveCall, rank: int, other: int, last: CollectiveCall) -> PeerError:
    return PeerError(
        where=f"{call.name} on rank {rank} ({call.place})",
        found=f"rank {other} has ended, after {last}",
        wanted="all ranks until the last call",
        remedy="see that rank's own output; look for sys.exit, a loader with fewer batches, or a loop that "
        "ends by what one rank alone sees",
        ended=other,
    )


def _user_line() -> tuple[str, int]:
    """File and line of the user's own code that this thread is in; an empty file where it is in none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


_current: RollCall | None = None
_timeout = TIMEOUT


def wait_at_most(timeout: timedelta) -> None:
    """Let meetings end after so long; before the first call that is collective."""
    global _timeout
    _timeout = timeout


def _roll_call() -> RollCall | None:
    """The roll call of the world as it is, None for a rank alone; collective the first time."""
    global _current
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1:
        return None
    if _current is not None and _current.world is not world:
        _current.end()
        _current = None
    _current = _current or RollCall(world)
    return _current


@contextmanager
def collective(name: str, *, compares: bool = False) -> Iterator[None]:
    """Around a call that all ranks make, or none; a call inside another one is a part of it.

    All ranks meet first, or in the call itself, if that `compares` what they pass.
    """
    roll_call = _roll_call()
    if roll_call is None or not roll_call.is_main or roll_call.is_inside:
        yield
        return
    roll_call.enter(name)
    try:
        if not compares and roll_call.meets():
            roll_call.compare(())
        yield
    finally:
        roll_call.leave()


def meets(number: int | None = None) -> bool:
    """Whether ranks meet for the call that this rank is in, or for the `number`-th of one kind of call; False
    for a single rank."""
    roll_call = _roll_call()
    if roll_call is None:
        return False
    return roll_call.meets() if number is None else roll_call.meetings.is_held(number)


def compare(parts: Sequence[StatementPart]) -> list[Statement] | None:
    """Compare parts as `RollCall.compare` does, in the call that this rank is in; collective."""
    roll_call = _roll_call()
    return None if roll_call is None else roll_call.compare(parts)


def pause_meetings(paused: bool) -> None:
    """Let no rank wait for others before its calls, or do again; on all ranks alike."""
    roll_call = _roll_call()
    if roll_call is not None:
        roll_call.meetings.is_paused = paused


def everybody(mine: T) -> list[T]:
    """The objects of all ranks, rank 0 first; a collective."""
    roll_call = _roll_call()
    return [mine] if roll_call is None else roll_call.meetings.everybody(mine)


def last_call() -> int:
    """The number of the call that this rank made last, for `backward_begins`."""
    return 0 if _current is None else _current.number


def backward_begins(of: int) -> None:
    """Inside backward, before anything else of it: meet as the backward of that call."""
    by_engine = torch.cuda.is_initialized()  # whose own thread runs a GPU's backward
    if _current is not None and (_current.is_main or by_engine) and not _current.is_inside:
        _current.enter_backward(of)
        if _current.meets():
            _current.compare(())


def go_on(how: str) -> None:
    """Say what the collective call that this rank is in does, which all ranks must do in it."""
    if _current is not None and _current.is_inside and _current.is_main:
        _current.go_on(how)
