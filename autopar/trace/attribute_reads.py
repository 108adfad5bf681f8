"""Which attributes of modules and settings a forward reads: the Python state that its graph is of.

    with recording() as reads:              nothing yet
        with reads.on():                    nn.Module and the classes of what is read are watched
            model(x)                        self.tau, self.drop.p, self.config.width ... by owner and name

Recorded is what was there before the call: what forward itself has put there isn't state that it reads.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from autopar.trace.numbers import Number

ALL = "*"  # in the place of names: every attribute
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes that Python code has made
_CONTAINERS = (list, tuple, dict, set, frozenset)
_NOT_WATCHED = (torch.Tensor, nn.Module, type, Enum, types.ModuleType)
_STATELESS = {
    *("torch", "builtins", "typing", "math", "functools", "itertools", "einops", "numpy"),
    *("logging", "warnings"),
}
_PROXIES = "torch.fx.experimental.proxy_tensor"  # whose classes stand for modules while torch traces


@dataclass(slots=True)
class Owner:
    """An object whose attributes were read: `state` is its dictionary, None for one of slots."""

    kind: type
    state: dict[str, Any] | None
    value: Any
    names: dict[str, None] = field(default_factory=dict)


class Reads:
    """The attributes that were read, by their owners, and the functions that ran."""

    def __init__(self) -> None:
        self.owners: dict[int, Owner] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.decisions: list[Any] = []  # `input_values.Decision`: what forward asked of its inputs
        self.left: Mapping[tuple[str, str], Any] = {}  # what forward leaves in its modules, by path and name
        self._seen: dict[int, Any] = {}
        self._watched: dict[type, Any] = {}
        self._written: set[tuple[int, str]] = set()
        self._tracers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def has(self, state: dict[str, Any], name: str) -> bool:
        """Whether an attribute was read, as it was before forward."""
        owner = self.owners.get(id(state))
        return owner is not None and (name in owner.names or ALL in owner.names)

    @contextmanager
    def on(self, *values: Any) -> Iterator[None]:
        """Record within; `values` are what the code gets at beside modules: a loss, arguments."""
        self._watch(nn.Module)
        self._written.clear()
        own_set: Any = nn.Module.__setattr__
        written = self._written

        def noting(module: nn.Module, name: str, value: Any) -> None:
            written.add((id(object.__getattribute__(module, "__dict__")), name))
            own_set(module, name, value)

        nn.Module.__setattr__ = noting  # type: ignore[method-assign, assignment]
        try:
            for value in values:
                self.see(value)
            yield
        finally:
            nn.Module.__setattr__ = own_set  # type: ignore[method-assign]
            for kind, own in self._watched.items():
                if own is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = own  # type: ignore[method-assign]
            self._watched.clear()

    def see(self, value: Any) -> None:
        """Watch the classes of `value` and of what it holds, and what functions name."""
        if type(value) is Number or id(value) in self._seen or isinstance(value, _NOT_WATCHED):
            return
        self._seen[id(value)] = value
        match value:
            case types.FunctionType():
                self._see_function(value)
            case types.MethodType():
                self.see(value.__func__)
                self.see(value.__self__)
            case functools.partial():
                for held in (value.func, value.args, value.keywords):
                    self.see(held)
            case dict():
                for held in value.values():
                    self.see(held)
            case list() | tuple() | set() | frozenset():
                for held in value:
                    self.see(held)
            case _ if _is_settings(type(value)):
                self._watch(type(value))
                self.see(vars(type(value)).get("__call__"))

    def _see_function(self, function: types.FunctionType) -> None:
        if is_torch(function.__module__):
            return
        self.functions[id(function)] = function
        for held in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.see(held)
        for cell in filled_cells(function):
            self.see(cell.cell_contents)
        for name in global_names(function.__code__):
            if name in function.__globals__:
                self.see(function.__globals__[name])

    def _watch(self, kind: type) -> None:
        if kind in self._watched:
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
            kind.__getattribute__ = watched  # type: ignore[method-assign, assignment]
        except TypeError:
            return
        self._watched[kind] = own

    def _record(self, value: Any, name: str, result: Any) -> None:
        if type(value) is nn.Module and self._is_tracers(value):
            return
        owner = self._owner(value)
        if name == "__dict__":
            if is_torch(sys._getframe(2).f_globals.get("__name__")):
                return  # nn.Module's own __setattr__ and __getattr__
            name = ALL
        elif (id(owner.state), name) in self._written:
            return  # forward has put it there
        owner.names[name] = None
        self.see(result)

    def _is_tracers(self, module: nn.Module) -> bool:
        """Whether it is the module into which torch.fx puts constants, which it alone asks for."""
        if id(object.__getattribute__(module, "__dict__")) in self.owners:
            return False
        if str(sys._getframe(3).f_globals.get("__name__")).startswith("torch.fx."):
            self._tracers.add(module)
        return module in self._tracers

    def _owner(self, value: Any) -> Owner:
        try:
            state = object.__getattribute__(value, "__dict__")
        except AttributeError:  # of slots alone
            state = None
        key = id(value) if state is None else id(state)
        if key not in self.owners:
            kind = next(kind for kind in type(value).__mro__ if not _is_proxy(kind))
            self.owners[key] = Owner(kind, state, value)
        return self.owners[key]


def _is_proxy(kind: type) -> bool:
    return any(base.__module__ == _PROXIES for base in kind.__mro__)


def _is_settings(kind: type) -> bool:
    """Whether it is a class of Python code, other than torch's."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not is_torch(kind.__module__)


def is_torch(module: str | None) -> bool:
    """Whether a module is torch's or a part of Python that holds no state of the user's: what a logger has
    told, and to whom, is none of the graph."""
    first = (module or "").partition(".")[0]
    return first in _STATELESS


def filled_cells(function: types.FunctionType) -> list[types.CellType]:
    """What the function closes over, as far as it is there yet."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        cells.append(cell)
    return cells


@functools.cache
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """All names that a function's code, and that of functions inside it, may look up."""
    inner = (
        name for item in code.co_consts if isinstance(item, types.CodeType) for name in global_names(item)
    )
    return (*code.co_names, *inner)


_current: ContextVar[Reads | None] = ContextVar("reads of the forward that is traced", default=None)


@contextmanager
def recording() -> Iterator[Reads]:
    """What all traces within read."""
    reads = Reads()
    token = _current.set(reads)
    try:
        yield reads
    finally:
        _current.reset(token)


@contextmanager
def reading(*values: Any) -> Iterator[Reads]:
    """Record what the code within reads, for whoever records, if anybody does."""
    reads = _current.get() or Reads()
    with reads.on(*values):
        yield reads
