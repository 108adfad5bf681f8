"""Rows of computed and published figures, and their tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

UNPUBLISHED = ""  # where no published number is known


@dataclass(frozen=True, slots=True)
class FigureRow:
    """What is computed here, by `formula` and by `other` means, beside what was published."""

    what: str
    formula: str
    other: str
    published: str = UNPUBLISHED
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Rows under one title; `other` says what the second figure is: a plan's, or counted."""

    title: str
    other: str
    rows: tuple[FigureRow, ...]

    @staticmethod
    def of(title: str, other: str, rows: Iterable[FigureRow]) -> FigureTable:
        return FigureTable(title, other, tuple(rows))

    def rendered(self) -> Table:
        """The table for a terminal."""
        table = Table(title=self.title, box=None, pad_edge=False, title_justify="left")
        for heading in self.headings:
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            table.add_row(row.what, row.formula, row.other, row.published, row.reason)
        return table

    def markdown(self) -> str:
        """The table for a page of the docs."""
        lines = [" | ".join(self.headings), "|".join(["---"] * len(self.headings))]
        lines += [" | ".join((r.what, r.formula, r.other, r.published, r.reason)) for r in self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {line} |" for line in lines)])

    @property
    def headings(self) -> tuple[str, ...]:
        return "", "by formula", self.other, "published", "why they differ"
