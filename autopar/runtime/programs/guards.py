"""What a trace has read, and whether it is there still: the guard of one program.

    reads      layer.drop: p, training      cfg: width      loss: its cells, its module's numbers
    guard      one list of objects, and one getter for each owner that gives its part of it
    a call     the same getters; every object must be the one it was         in C: 0.3 ms for 1,000 modules
    another    equal numbers and texts are taken over, anything else has changed

Lists, tuples and dicts are followed to what they hold, tensors by their version. Children, parameters,
buffers, hooks and modes of the model's modules are guarded elsewhere: `user_tree`, and the key of a call.
Those of other modules, such as a loss, are guarded here.
"""

from __future__ import annotations

import contextvars
import functools
import io
import operator
import os
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.tree.old_parameters import OldParameter
from autopar.torch_seams.tensors import version_of
from autopar.trace.reads.attribute_reads import ALL, AttributeOwner, Reads
from autopar.trace.reads.numbers import is_number
from autopar.trace.reads.reachable_state import Namespace, filled_cells, is_python_class, members
from autopar.trace.values.input_values import changed

_CELL = object()  # the key of what a cell holds
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ELSEWHERE = {
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "_autopar",
    *(name for name in vars(nn.Module()) if "hook" in name),
}
_HELD = ("_buffers", "_parameters", "_modules")


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """A number's slot, to read and replace it: a key of a dictionary, or a cell."""

    place: Any
    key: Any

    def read(self) -> Any:
        """The number in the slot."""
        return self.place.cell_contents if self.key is _CELL else self.place[self.key]

    def write(self, value: Any) -> None:
        """Put another value into the slot."""
        if self.key is _CELL:
            self.place.cell_contents = value
        else:
            self.place[self.key] = value

    @property
    def name(self) -> tuple[int, Any]:
        """A key that is equal for one slot."""
        return id(self.place), self.key


class Guard:
    """Holds as long as everything that was `read` is what it is now.

    `own` are the modules of the model.
    """

    def __init__(
        self, reads: Reads, free: Collection[NumberSlot] = (), *, own: Iterable[nn.Module] = ()
    ) -> None:
        self._decisions = tuple(reads.decisions)
        self._own_states = {id(vars(module)) for module in own}
        self._slots: list[NumberSlot | None] = []  # of every object that is expected
        self._getters: list[Callable[[Any], Any]] = []
        self._places: list[Any] = []
        self._expected: list[Any] = []
        self._names: list[str] = []
        self._sized: list[Any] = []
        self._lengths: list[int] = []
        self._absent: list[_Absent | None] = []  # of each of them, None where its length is what counts
        self._shown: list[str] = []
        self._visited: dict[int, Any] = {}
        self._known: set[tuple[Any, str]] = set()  # attributes of classes
        named = reads.by_name()
        for space in named.namespaces.values():
            self._space(space)
        for owner in reads.owners.values():
            if owner.find() is not None:
                self._own(owner)
        for function in named.functions.values():
            self._function(function)
        self._follow(reads.loss, "the loss")
        if named.reads_environment:
            self._add(os.environ, _variables(named.names), ["an environment variable"])
        names = {slot.name for slot in free}
        self._free = {
            index for index, slot in enumerate(self._slots) if slot is not None and slot.name in names
        }

    def holds(self, tensors: Sequence[Tensor] | None = None) -> bool:
        """True if all reads, and all answers about a call's `tensors`, are those of the trace."""
        return self.change(tensors) is None

    def change(self, tensors: Sequence[Tensor] | None = None) -> str | None:
        """The name of something that has changed, None if nothing has."""
        if (name := self._changed()) is not None or tensors is None:
            return name
        decision = changed(self._decisions, tensors)
        return None if decision is None else f"what inputs decide ({decision.line})"

    def _changed(self) -> str | None:
        try:
            now = list(chain.from_iterable(map(operator.call, self._getters, self._places)))
        except (KeyError, IndexError, AttributeError, ValueError):
            return self._missing()
        if len(now) != len(self._expected):
            return "the length of a list that forward reads"
        if not all(map(operator.is_, now, self._expected)):
            for index, (value, before) in enumerate(zip(now, self._expected, strict=True)):
                if value is not before and not _equal(value, before) and not self._is_free(index, value):
                    return self._names[index]
            self._expected = now
        return None if list(map(len, self._sized)) == self._lengths else self._grown()

    def now(self) -> str:
        """The numbers and texts of now that were others."""
        numbers = self.numbers() or []
        return repr([slot.read() for slot, _ in numbers])

    def _is_free(self, index: int, value: Any) -> bool:
        return index in self._free and type(value) is type(self._expected[index])

    def numbers(self) -> list[tuple[NumberSlot, Any]] | None:
        """Slots whose numbers have changed, with the old numbers. None if anything else has changed, or a
        number that can't be reached."""
        try:
            now = list(chain.from_iterable(map(operator.call, self._getters, self._places)))
        except (KeyError, IndexError, AttributeError, ValueError):
            return None
        if len(now) != len(self._expected) or list(map(len, self._sized)) != self._lengths:
            return None
        changed = []
        for value, before, slot in zip(now, self._expected, self._slots, strict=True):
            if value is before or _equal(value, before):
                continue
            if slot is None or not is_number(value) or type(value) is not type(before):
                return None
            changed.append((slot, before))
        return changed

    def places(self) -> list[tuple[str, NumberSlot]]:
        """Numbers that were read and can be replaced, by name."""
        pairs = zip(self._names, self._slots, strict=True)
        return [(name, slot) for name, slot in pairs if slot is not None]

    # -- what is there ------------------------------------------------------------------------------

    def _add(
        self, place: Any, getter: Callable[[Any], Any], names: Collection[str], keys: Collection[Any] = ()
    ) -> None:
        """Add a place whose getter gives one object for each name; `keys` say where they can be replaced."""
        if not names:
            return
        values = list(getter(place))
        self._slots.extend(NumberSlot(place, key) for key in keys or ())
        self._slots.extend([None] * (len(names) - len(keys)))
        self._places.append(place)
        self._getters.append(getter)
        self._expected.extend(values)
        self._names.extend(names)
        for name, value in zip(names, values, strict=True):
            self._follow(value, name)

    def _own(self, owner: AttributeOwner) -> None:
        state, shown = owner.state, owner.kind.__name__
        names = [name for name in owner.names if name not in _ELSEWHERE and not name.startswith("__")]
        if state is not None:
            if ALL in names:
                names = [*names, *(name for name in state if name not in _ELSEWHERE)]
                self._size(state, None, shown)
            held = [name for name in dict.fromkeys(names) if name in state and name != ALL]
            self._add(state, _items(held), [f"{shown}.{name}" for name in held], held)
            names = [name for name in names if name not in state]
            if issubclass(owner.kind, nn.Module) and id(state) not in self._own_states:
                self._own_of_others(owner, state, shown)
            if names:
                self._size(state, _Absent(frozenset(names)), shown)
        for name in names:
            self._class_attribute(owner, name)

    def _space(self, space: Namespace) -> None:
        if space.recorded:
            return
        held, table = space.held(), space.table
        shown = list(map(space.path, held))
        self._add(table, _items(held), shown, held if isinstance(table, dict) else ())
        if not space.is_library:
            self._size(table, _Absent(space.names.keys(), frozenset(held)), space.shown)

    def _own_of_others(self, owner: AttributeOwner, state: dict[str, Any], shown: str) -> None:
        """Add a module outside of the model: its mode, buffers, parameters and children."""
        if "training" in owner.names:
            self._add(state, _items(["training"]), [f"{shown}.training"])
        for kind in _HELD:
            every = kind in owner.names or ALL in owner.names  # as a container reads its children
            held = [name for name in state.get(kind, ()) if every or name in owner.names]
            self._add(state[kind], _items(held), [f"{shown}.{name}" for name in held])
            if every:
                self._size(state[kind], None, f"{shown}.{kind}")

    def _size(self, place: Any, absent: _Absent | None, shown: str) -> None:
        """Notice another length; where some names are `absent`, only if they are among what is new."""
        self._sized.append(place)
        self._lengths.append(len(place))
        self._absent.append(absent)
        self._shown.append(shown)

    def _class_attribute(self, owner: AttributeOwner, name: str) -> None:
        for kind in owner.kind.__mro__:
            if name in kind.__dict__:
                break
        else:
            return
        value = kind.__dict__[name]
        if isinstance(value, types.MemberDescriptorType):  # a slot
            self._add(owner.find(), _slot(name), [f"{owner.kind.__name__}.{name}"])
        elif kind not in (nn.Module, object) and (owner.kind, name) not in self._known:
            self._known.add((owner.kind, name))
            self._add(owner.kind.__mro__, _static(name), [f"{owner.kind.__name__}.{name}"])

    # -- what it holds ------------------------------------------------------------------------------

    def _follow(self, value: Any, name: str) -> None:
        if isinstance(value, (*_ATOMS, OldParameter)) or id(value) in self._visited:
            return
        self._visited[id(value)] = value
        match value:
            case torch.Tensor():
                if not value.is_inference():
                    self._add(value, _version, [name])
            case dict():
                self._size(value, None, name)
                keys = list(dict.keys(value))
                self._add(value, _entries(value, keys), [f"{name}[{key!r}]" for key in keys], keys)
            case types.MappingProxyType():  # of a dict that others may write
                self._size(value, None, name)
                self._add(value, _items(list(value)), [f"{name}[{key!r}]" for key in value])
            case list() | deque():
                self._size(value, None, name)
                items = range(len(value))
                self._add(value, iter, [f"{name}[{index}]" for index in items], items)
            case tuple():
                for index, held in enumerate(members(value)):
                    self._follow(held, f"{name}[{index}]")
            case functools.partial():
                self._follow(value.func, name)
                self._follow(value.args, f"{name}.args")
                self._follow(value.keywords, f"{name}.keywords")
            case _ if (ask := _ASKED.get(type(value))) is not None:
                self._add(value, ask, [name])
            case Iterator() if not is_python_class(type(value)) and not isinstance(value, io.IOBase):
                raise _moves_on(name, value)

    def _function(self, function: types.FunctionType) -> None:
        shown = function.__qualname__.replace(".<locals>", "")
        for cell in filled_cells(function):
            self._add(cell, _contents, [f"what {shown} closes over"], [_CELL])
        self._add(function, _CODE, [f"the code of {shown}", *[f"defaults of {shown}"] * 2])

    # -- what has changed ---------------------------------------------------------------------------

    def _missing(self) -> str:
        names = iter(self._names)
        for place, getter in zip(self._places, self._getters, strict=True):
            try:
                given = list(getter(place))
            except (KeyError, IndexError, AttributeError, ValueError):
                return next(names)
            for _ in given:
                next(names, "")
        return "what forward reads"

    def _grown(self) -> str | None:
        """Name of a value that was absent when it was read and is there now; other new attributes don't
        count."""
        for place, absent, shown, length in zip(
            self._sized, self._absent, self._shown, self._lengths, strict=True
        ):
            if absent is None and len(place) != length:
                return f"the length of {shown}"
            if absent is not None and (new := absent.among(place)):
                return f"{shown}.{new}"
        self._lengths = list(map(len, self._sized))
        return None


@dataclass(frozen=True, slots=True)
class _Absent:
    """Names that were looked up where they weren't, beside those that were `held`."""

    names: Collection[str]
    held: frozenset[str] = frozenset()

    def among(self, place: Mapping[str, Any]) -> str | None:
        """The first name that `place` has now and hadn't before; None without."""
        return next((name for name in place if name in self.names and name not in self.held), None)


def _moves_on(name: str, value: object) -> InputError:
    return InputError(
        where=name,
        found=f"a {type(value).__name__} that forward may take the next item of, which no program can repeat",
        wanted="state that can be read without changing it",
        remedy="keep the items in a list and the place in it as a number, or pass the item as an argument",
    )


def _equal(value: Any, before: Any) -> bool:
    """Whether two values are equal to a guard: numbers and tuples by value, other objects by identity."""
    if type(value) is not type(before):
        return False
    if isinstance(value, tuple):
        ours, theirs = tuple(members(value)), tuple(members(before))
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(value, float) and value != value:
        return bool(before != before)
    if isinstance(value, (types.MethodType, frozenset, *_ATOMS)):
        return bool(value == before)
    return value is before


def _items(names: Collection[Any]) -> Callable[[Any], Any]:
    """Return a getter of a mapping's items under `names`, as a tuple."""
    keys = list(names)
    if len(keys) == 1:
        key = keys[0]
        return lambda place: (place[key],)
    return operator.itemgetter(*keys) if keys else lambda place: ()


def _entries(table: dict[Any, Any], keys: list[Any]) -> Callable[[Any], Any]:
    """Gives the items of a dict, also of a class that makes something of keys."""
    if type(table).__getitem__ is dict.__getitem__:
        return _items(keys)
    return lambda place: [dict.__getitem__(place, key) for key in keys]


def _contents(cell: types.CellType) -> tuple[Any]:
    return (cell.cell_contents,)


def _slot(name: str) -> Callable[[Any], Any]:
    """Gives what an object has in a slot; itself where that is unset."""
    return lambda place: (getattr(place, name, place),)


def _static(name: str) -> Callable[[Any], Any]:
    """Gives what classes, in the order of their resolution, have under a name."""
    return lambda kinds: (next(vars(kind)[name] for kind in kinds if name in vars(kind)),)


def _version(tensor: torch.Tensor) -> tuple[int]:
    return (version_of(tensor),)


def _members(value: set[Any]) -> tuple[frozenset[Any]]:
    return (frozenset(value),)


def _digest(array: np.ndarray[Any, Any] | bytearray | array[Any]) -> tuple[bytes]:
    return (bytes(array),)


def _referent(reference: weakref.ReferenceType[Any]) -> tuple[int]:
    return (id(reference()),)


def _in_context(variable: contextvars.ContextVar[Any]) -> tuple[Any]:
    return (variable.get(None),)


def _variables(names: Iterable[str]) -> Callable[[Any], Any]:
    """Return a getter of the environment variables called `names`."""
    keys = [os.fsencode(name) for name in names]
    # What os.environ decodes: 400 names take 20 us, and 400 by itself.
    return lambda environment: (tuple(map(environment._data.get, keys)),)  # noqa: SLF001  (Python's)


_ASKED: dict[type, Callable[[Any], Any]] = {
    set: _members,
    np.ndarray: _digest,
    bytearray: _digest,
    array: _digest,
    weakref.ReferenceType: _referent,
    contextvars.ContextVar: _in_context,
}
_CODE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
