"""Levels of a stage's memory: its tables as it is planned, and with less and less memory for more seconds.

level 0      fastest, most bytes
a mix        `rich`, of a faster level, for a share of the stage at its end; `lean` before
last level   slowest, fewest bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost.interval_table import Table
from autopar.cost.stages.intervals import Intervals
from autopar.cost.stages.split_backward import Halves

QUANTILES = tuple(step / 16 for step in range(17))  # of seconds per byte, tried as a price


@dataclass(frozen=True, slots=True)
class Mix:
    """The levels of a stage: `rich` for a `share` of it at its end, and `lean` before."""

    lean: int
    rich: int
    share: float


@dataclass(frozen=True, slots=True)
class MixTables:
    """The levels and shares of `Mix` for one stage, in tables [p, q]."""

    lean: NDArray[np.intp]
    rich: NDArray[np.intp]
    share: Table

    @staticmethod
    def under(cap: float, nbytes: NDArray[np.float64], seconds: NDArray[np.float64]) -> MixTables:
        """Mix levels of `nbytes` and `seconds` [level, p, q] under a cap; the smallest level where none
        fits."""
        fits = nbytes <= cap
        fastest = np.where(fits, seconds, np.inf).argmin(axis=0)
        lean = np.where(fits.any(axis=0), fastest, nbytes.argmin(axis=0))
        room, base = cap - _at(nbytes, lean), _at(seconds, lean)
        beyond = np.where(fits, np.inf, nbytes - cap + room).clip(min=1.0)  # bytes from the leaner level
        share = (room / beyond).clip(min=0.0)
        rich = (share * (base - seconds)).argmax(axis=0)
        gains = _at(share * (base - seconds), rich) > 0
        return MixTables(lean, np.where(gains, rich, lean), np.where(gains, _at(share, rich), 0.0))

    def of(self, tables: NDArray[np.float64]) -> Table:
        """Interpolation between the two levels of `tables` [level, p, q]."""
        lean = _at(tables, self.lean)
        return lean + self.share * (_at(tables, self.rich) - lean)

    def at(self, p: int, q: int) -> Mix:
        """The mix of the stage [p, q)."""
        return Mix(int(self.lean[p, q]), int(self.rich[p, q]), float(self.share[p, q]))


@dataclass(frozen=True, slots=True)
class LevelTables:
    """The tables [level, p, q] in which levels differ, by name, and those of split backwards."""

    first: Intervals
    tables: Mapping[str, NDArray[np.float64]]
    halves: Mapping[str, NDArray[np.float64]]

    @staticmethod
    def of(first: Intervals, levels: Sequence[Intervals]) -> LevelTables:
        return LevelTables(first, _differing(levels), _differing([level.halves for level in levels]))

    def mixed(self, mixes: MixTables) -> Intervals:
        """Intervals interpolated between the levels."""
        halves = {name: mixes.of(tables) for name, tables in self.halves.items()}
        tables: dict[str, Any] = {name: mixes.of(tables) for name, tables in self.tables.items()}
        return replace(self.first, halves=replace(self.first.halves, **halves), **tables)


def _differing(levels: Sequence[Intervals] | Sequence[Halves]) -> dict[str, NDArray[np.float64]]:
    """The tables that are not the same on all levels, by name, each as one."""
    named = {each.name: [getattr(level, each.name) for level in levels] for each in fields(levels[0])}
    return {
        name: np.stack(tables)
        for name, tables in named.items()
        if np.ndim(tables[0]) == 2 and not all(np.array_equal(tables[0], table) for table in tables)
    }


def _at(tables: NDArray[np.float64], level: NDArray[np.intp]) -> Table:
    found: Table = np.take_along_axis(tables, level[None], axis=0)[0]
    return found


def most_crossing(levels: Sequence[Intervals]) -> Intervals:
    """The first level, with the most that crosses each cut on any."""
    rows = ("send", "send_back", "received", "received_back")
    return replace(
        levels[0],
        **{name: np.maximum.reduce([getattr(level, name) for level in levels]) for name in rows},
    )
