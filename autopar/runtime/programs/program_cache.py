"""The programs of one parallel module: by kind of call, and under it by what their traces have read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from autopar.runtime.programs.free_numbers import Free
from autopar.runtime.programs.guards import Guard
from autopar.runtime.programs.structure_guard import StructureGuard
from autopar.trace.call.call_signature import Arguments
from autopar.trace.reads.inside import LeftInside

STATES = 16  # programs of one kind of call: of other attributes, numbers or flags
KINDS = 256  # kinds of call: a program takes about 0.5 MB


P = TypeVar("P")
Key = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Entry(Generic[P]):
    """A program, the guard of what its trace read, and what each call leaves in modules and objects.

    `left` is by path and name of modules, `inside` are attributes of other objects.
    It was made for a call with these `constants`; `free` are numbers that may be others.
    """

    program: P
    guard: Guard
    left: Mapping[tuple[str, str], Any]
    constants: tuple[Any, ...] = ()
    free: Free | None = None
    structure: StructureGuard | None = None
    inside: tuple[LeftInside, ...] = ()

    def fits(self, call: Arguments) -> bool:
        """Whether the entry's program serves a call as things are; if so, free numbers are set to the
        call's."""
        if not self.guard.holds(call.tensors) or (self.structure and self.structure.change(call.tensors)):
            return False
        return self.free is None or self.free.settle(call.constants)


class ProgramCache(Generic[P]):
    """Programs, those that ran last in front; the ones that ran longest ago are dropped."""

    def __init__(self) -> None:
        self._kinds: dict[Key, list[Entry[P]]] = {}
        self._free: dict[frozenset[int], None] = {}  # places of arguments that are free in some

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def programs(self) -> Iterator[P]:
        """All programs of the cache."""
        return (entry.program for entries in self._kinds.values() for entry in entries)

    def fixed(self) -> Iterator[P]:
        """The programs without numbers that differ from call to call."""
        return (entry.program for entries in self._kinds.values() for entry in entries if entry.free is None)

    def plans(self) -> Iterator[tuple[Key, P]]:
        """All programs with their kinds of call."""
        return ((key, entry.program) for key, entries in self._kinds.items() for entry in entries)

    def of(self, key: Key) -> list[Entry[P]]:
        """The programs of one kind of call."""
        return self._kinds.get(key, [])

    def like(self, key: Key) -> list[Entry[P]]:
        """The programs of this kind of call and of others that differ in the first part of their key
        alone."""
        return [entry for kind, entries in self._kinds.items() if kind[1:] == key[1:] for entry in entries]

    def find(self, key: Key, call: Arguments) -> Entry[P] | None:
        """The program for this kind of call whose guard holds."""
        for arguments in self._free:
            if (entry := self._find(_without(key, arguments), call)) is not None:
                return entry
        return self._find(key, call)

    def _find(self, key: Key, call: Arguments) -> Entry[P] | None:
        entries = self._kinds.get(key, [])
        for index, entry in enumerate(entries):
            if entry.fits(call):
                if index:
                    entries.insert(0, entries.pop(index))
                return entry
        return None

    def add(self, key: Key, entry: Entry[P]) -> bool:
        """Add a program and drop the oldest beyond the limits; True if any was dropped."""
        if entry.free is not None and (arguments := entry.free.arguments):
            self._free[arguments] = None
            key = _without(key, arguments)
        entries = self._kinds.pop(key, [])
        entries.insert(0, entry)
        self._kinds[key] = entries
        drops = len(entries) > STATES or len(self._kinds) > KINDS
        del entries[STATES:]
        while len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        return drops


def _without(key: Key, arguments: frozenset[int]) -> Key:
    """The kind of call whose `arguments` may be any numbers of their types."""
    constants = key[0] if key else ()
    if not isinstance(constants, tuple) or not all(place < len(constants) for place in arguments):
        return key
    return (
        tuple(
            item[:1] if place in arguments and isinstance(item, tuple) else item
            for place, item in enumerate(constants)
        ),
        *key[1:],
    )
