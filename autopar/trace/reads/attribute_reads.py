"""Which attributes of modules and settings a forward reads: the Python state that its graph is of.

    with recording() as reads:              nothing yet
        reads.see(model, loss)              what their code can reach by name
        with reads.on():                    nn.Module and the classes of what is reached are watched
            model(x)                        self.tau, self.drop.p, self.config.width ... by owner and name

Recorded is what was there before the call: what forward itself has put there isn't state that it reads.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from autopar.torch_seams.fakes import FakeTensor, FunctionalTensor
from autopar.trace.reads.code_that_ran import code_that_runs
from autopar.trace.reads.inside import LeftInside
from autopar.trace.reads.numbers import Number
from autopar.trace.reads.reachable_state import Reachable, is_torch

ALL = "*"  # in the place of names: every attribute
_NOT_WATCHED = (torch.Tensor, nn.Module, type, Enum, types.ModuleType)


@dataclass(slots=True)
class AttributeOwner:
    """An object whose attributes were read: `state` is its dictionary, None for one of slots.

    `find` gives it, None once it is gone, as what forward made for itself."""

    kind: type
    state: dict[str, Any] | None
    find: Callable[[], Any]
    names: dict[str, None] = field(default_factory=dict)


class Reads:
    """Attributes that code has read, by the object that has them, and what it can reach by name."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.owners: dict[int, AttributeOwner] = {}
        self.reachable = Reachable(self._watch)
        self.roots: tuple[Any, ...] = ()
        self._ran: set[types.CodeType] = set()
        self._keeps = keeps
        self.loss: Any = None
        self.decisions: list[Any] = []  # `input_values.InputDecision`: what forward asked of its inputs
        self.left: Mapping[tuple[str, str], Any] = {}  # what forward leaves in its modules, by path and name
        self.inside: tuple[LeftInside, ...] = ()  # and in objects outside
        self._is_on = False
        self._kinds: dict[type, None] = {nn.Module: None}
        self._watched: dict[type, Any] = {}
        self._written: set[tuple[int, str]] = set()
        self._tracers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def has(self, state: dict[str, Any], name: str) -> bool:
        """Whether the attribute `name` of the object with this `state` was read, with its value from before
        forward."""
        owner = self.owners.get(id(state))
        return owner is not None and (name in owner.names or ALL in owner.names)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record within; what the code gets at beside modules, a loss and arguments, has been seen before."""
        self._is_on = True
        for kind in self._kinds:
            self._watch(kind)
        self._written.clear()
        own_set: Any = nn.Module.__setattr__
        written = self._written

        def noting(module: nn.Module, name: str, value: Any) -> None:
            written.add((id(object.__getattribute__(module, "__dict__")), name))
            own_set(module, name, value)

        nn.Module.__setattr__ = noting  # type: ignore[method-assign, assignment]
        try:
            with code_that_runs() if self._keeps else nullcontext(set[types.CodeType]()) as ran:
                yield
            self._ran |= ran
        finally:
            self._is_on = False
            self.reachable.let_go()
            nn.Module.__setattr__ = own_set  # type: ignore[method-assign]
            for kind, own in self._watched.items():
                if own is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = own  # type: ignore[method-assign]
            self._watched.clear()

    def by_name(self) -> Reachable:
        """Objects that the code that ran can look up by name."""
        named = Reachable(ran=self._ran)
        named.see(*self.roots)
        return named

    def see(self, *values: Any) -> None:
        """Take in what code can reach from values, and watch the classes of objects among that."""
        self.reachable.see(*(value for value in values if type(value) is not Number))

    def _watch(self, kind: type) -> None:
        """Record from now on what is read of objects of this class."""
        if kind is not nn.Module and issubclass(kind, _NOT_WATCHED):
            return
        self._kinds[kind] = None
        if kind in self._watched or not self._is_on:
            return
        own = kind.__dict__.get("__getattribute__")
        original: Any = kind.__getattribute__
        record = self._record

        def watched(owner: Any, name: str) -> Any:
            try:
                value = original(owner, name)
            except AttributeError:
                record(owner, name, None)
                raise
            record(owner, name, value)
            return value

        try:
            kind.__getattribute__ = watched  # type: ignore[method-assign]
        except TypeError:
            return
        self._watched[kind] = own

    def _record(self, value: Any, name: str, result: Any) -> None:
        if type(value) is nn.Module and self._is_tracers(value):
            return
        if name.startswith("__") and name != "__dict__":
            return  # of classes, which are looked at by name
        if name == "__dict__" and is_torch(sys._getframe(2).f_globals.get("__name__")):
            return  # nn.Module's own __setattr__ and __getattr__
        # By type: `isinstance` reads `__class__`, which is recorded, too.
        is_traced = issubclass(type(result), (FakeTensor, FunctionalTensor))
        if is_traced and not issubclass(type(value), nn.Module):
            return  # which forward has put there
        owner = self._owner(value)
        if name == "__dict__":
            name = ALL
        elif (id(owner.state), name) in self._written:
            return  # forward has put it there
        owner.names[name] = None
        if not self.reachable.knows(result):
            self.see(result)

    def _is_tracers(self, module: nn.Module) -> bool:
        """Whether a module is the one into which torch.fx puts constants, for which torch.fx alone asks."""
        if id(object.__getattribute__(module, "__dict__")) in self.owners:
            return False
        if str(sys._getframe(3).f_globals.get("__name__")).startswith("torch.fx."):
            self._tracers.add(module)
        return module in self._tracers

    def _owner(self, value: Any) -> AttributeOwner:
        try:
            state = object.__getattribute__(value, "__dict__")
        except AttributeError:  # of slots alone
            state = None
        key = id(value) if state is None else id(state)
        if key not in self.owners:
            self.owners[key] = AttributeOwner(type(value), state, _finder(value))
        return self.owners[key]


def _finder(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # of slots alone
        return lambda: value


_current: ContextVar[Reads | None] = ContextVar("reads of the forward that is traced", default=None)


@contextmanager
def recording() -> Iterator[Reads]:
    """Yield a record of all that traces read within."""
    reads = Reads()
    token = _current.set(reads)
    try:
        yield reads
    finally:
        _current.reset(token)


def current() -> Reads:
    """The current record of reads, or one that is thrown away."""
    return _current.get() or Reads(keeps=False)
