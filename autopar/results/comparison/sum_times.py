"""Algorithms of a sum between nodes side by side, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.units import show_bytes, show_seconds

ABSENT_TIME = "-"


@dataclass(frozen=True, slots=True)
class SumTime:
    """An algorithm's steps, bytes on the busiest link of each, and seconds; None without groups of nodes."""

    algorithm: str
    steps: int | None
    most_loaded_bytes: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SumTimes:
    """One row for each algorithm that sums `nbytes` between the nodes of a cluster."""

    cluster: str
    nodes: int
    nbytes: int
    rows: tuple[SumTime, ...]

    @property
    def best(self) -> SumTime:
        """The fastest; of equal ones the first."""
        return min(self.rows, key=lambda row: float("inf") if row.seconds is None else row.seconds)

    def as_dict(self) -> dict[str, Any]:
        """The table as the command line's JSON shows it."""
        rows = [{name: getattr(row, name) for name in row.__slots__} for row in self.rows]
        return {
            "cluster": self.cluster,
            "nodes": self.nodes,
            "bytes": self.nbytes,
            "rows": rows,
            "best": self.best.algorithm,
        }


def render_sum_times(found: SumTimes) -> RenderableType:
    """The table for a terminal."""
    title = f"A sum of {show_bytes(found.nbytes)} between {found.nodes} nodes"
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("algorithm", no_wrap=True)
    for heading in ("steps", "on the busiest link", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(row.algorithm, *_cells(row), style="bold" if row is found.best else None)
    return Group(table, f"{found.cluster}", f"best: {found.best.algorithm}")


def _cells(row: SumTime) -> list[str]:
    if row.steps is None or row.most_loaded_bytes is None or row.seconds is None:
        return [ABSENT_TIME] * 3
    return [str(row.steps), show_bytes(row.most_loaded_bytes), show_seconds(row.seconds)]
