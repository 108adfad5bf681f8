"""The programs of one parallel module: by kind of call, and under it by what their traces have read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from autopar.runtime.module.guards import Guard

STATES = 16  # programs of one kind of call: of other attributes, numbers or flags
KINDS = 256  # kinds of call: a program takes about 0.5 MB


P = TypeVar("P")
Key = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Entry(Generic[P]):
    """A program, the guard of what its trace read, and what forward leaves in modules, by path and name."""

    program: P
    guard: Guard
    left: Mapping[tuple[str, str], Any]


class ProgramCache(Generic[P]):
    """Programs, those that ran last in front; the ones that ran longest ago are dropped."""

    def __init__(self) -> None:
        self._kinds: dict[Key, list[Entry[P]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def programs(self) -> Iterator[P]:
        """All of them."""
        return (entry.program for entries in self._kinds.values() for entry in entries)

    def plans(self) -> Iterator[tuple[Key, P]]:
        """All of them, with their kinds of call."""
        return ((key, entry.program) for key, entries in self._kinds.items() for entry in entries)

    def of(self, key: Key) -> list[Entry[P]]:
        """Those of one kind of call."""
        return self._kinds.get(key, [])

    def like(self, key: Key) -> list[Entry[P]]:
        """Those of this kind of call and of others that differ in the first part of their key alone."""
        return [entry for kind, entries in self._kinds.items() if kind[1:] == key[1:] for entry in entries]

    def find(self, key: Key) -> Entry[P] | None:
        """The program for this kind of call whose guard holds."""
        entries = self._kinds.get(key, [])
        for index, entry in enumerate(entries):
            if entry.guard.holds():
                if index:
                    entries.insert(0, entries.pop(index))
                return entry
        return None

    def add(self, key: Key, entry: Entry[P]) -> None:
        """Take in a program, and drop what has been there too long."""
        entries = self._kinds.pop(key, [])
        entries.insert(0, entry)
        self._kinds[key] = entries
        del entries[STATES:]
        while len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
