"""Equal blocks of a table are printed once.

    h.0.fc   4 ms          h.0 … h.2, each
    h.0.act  1 ms            .fc    4 ms
    h.1.fc   4 ms            .act   1 ms
    h.1.act  1 ms     ->   h.3
    h.2.fc   4 ms            ...
    h.2.act  1 ms
    h.3.fc   5 ms

Blocks are rows that follow each other and whose names begin with the same words and number. Neighbours with
consecutive numbers are equal if all that is printed of them is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table: a dotted name, and the text of its cells."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RepeatedRows:
    """Rows of which `first` to `last` (names of blocks, equal if there is one) have one set each; their names
    are what follows the block's."""

    first: str
    last: str
    count: int
    rows: tuple[TableRow, ...]


def fold_rows(rows: Sequence[TableRow], place: int = 0) -> list[TableRow | RepeatedRows]:
    """The rows, of which equal blocks by the number at `place` of their names, or a later one, are folded."""
    found: list[TableRow | RepeatedRows] = []
    for blocks in _alike([_BlockRows.of(key, own) for key, own in _runs(rows, place)]):
        first, last = blocks[0], blocks[-1]
        if len(blocks) > 1:
            found.append(RepeatedRows(first.name, last.name, len(blocks), first.inner))
        elif first.number is None or len(first.rows) == 1:
            found += first.rows
        else:
            found += fold_rows(first.rows, place + 1)
    return found


@dataclass(frozen=True, slots=True)
class _BlockRows:
    """Consecutive rows of one block, or of none."""

    stem: str
    number: int | None
    rows: tuple[TableRow, ...]

    @staticmethod
    def of(key: tuple[str, int | None], rows: Sequence[TableRow]) -> _BlockRows:
        return _BlockRows(*key, tuple(rows))

    @property
    def name(self) -> str:
        return f"{self.stem}{self.number}"

    @property
    def inner(self) -> tuple[TableRow, ...]:
        """The rows by what follows the block's name."""
        return tuple(TableRow(row.name.removeprefix(self.name), row.cells) for row in self.rows)

    def follows(self, other: _BlockRows) -> bool:
        """Whether these rows are the next block after `other`, and equal to it."""
        if self.number is None or other.number is None:
            return False
        return (self.stem, self.number, self.inner) == (other.stem, other.number + 1, other.inner)


def _runs(rows: Sequence[TableRow], place: int) -> Iterator[tuple[tuple[str, int | None], list[TableRow]]]:
    """Rows that follow each other with the same words up to the number at `place`, and the same number."""

    def key(row: TableRow) -> tuple[str, int | None]:
        numbers = list(NUMBER.finditer(row.name))
        if place >= len(numbers):
            return "", None
        at = numbers[place]
        return row.name[: at.start()], int(at[0])

    for found, own in groupby(rows, key):
        yield found, list(own)


def _alike(parts: Sequence[_BlockRows]) -> list[list[_BlockRows]]:
    """The parts, those that are equal and follow each other together."""
    found: list[list[_BlockRows]] = []
    for part in parts:
        if found and part.follows(found[-1][-1]):
            found[-1].append(part)
        else:
            found.append([part])
    return found
