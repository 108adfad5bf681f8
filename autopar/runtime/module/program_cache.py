"""The programs of one parallel module: by kind of call, and under it by what their traces have read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from autopar.runtime.module.guards import Guard

STATES = 16  # programs of one kind of call: of other attributes, numbers or flags
KINDS = 256  # kinds of call: a program takes about 0.5 MB


P = TypeVar("P")


class ProgramCache(Generic[P]):
    """Programs, those that ran last in front; the ones that ran longest ago are dropped."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, list[tuple[Guard, P]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def programs(self) -> Iterator[P]:
        """All of them."""
        return (program for entries in self._kinds.values() for _, program in entries)

    def keys(self) -> Iterator[Hashable]:
        """Their kinds of call."""
        return iter(self._kinds)

    def of(self, key: Hashable) -> list[P]:
        """Those of one kind of call."""
        return [program for _, program in self._kinds.get(key, [])]

    def find(self, key: Hashable) -> P | None:
        """The program for this kind of call whose guard holds."""
        entries = self._kinds.get(key, [])
        for index, (guard, program) in enumerate(entries):
            if guard.holds():
                if index:
                    entries.insert(0, entries.pop(index))
                return program
        return None

    def add(self, key: Hashable, guard: Guard, program: P) -> None:
        """Take in a program, and drop what has been there too long."""
        entries = self._kinds.pop(key, [])
        entries.insert(0, (guard, program))
        self._kinds[key] = entries
        del entries[STATES:]
        while len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
