"""Strategies side by side as data: what each is predicted to take, what it took, how well that agrees.

accuracy            mean of 1 - |predicted - measured| / measured over the rows that ran, none below 0
rank correlation    Spearman's: Pearson's correlation of the ranks, equal values sharing their mean rank
regret              measured seconds of the chosen plan / those of the fastest row - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.results.files.text import html_of, text_of
from autopar.results.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Measured:
    """What a training step took: the median of some, in seconds, and the fullest rank's peak in bytes."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy; `reason` says why it can't be used, and is None if it can.

    `plan` is also there if only the memory cap forbids it. On more than `device_limit` devices some
    layers would run whole, or none could be split; None where the strategy has no such limit.
    """

    name: str
    plan: Plan | None
    device_limit: int | None
    reason: str | None = None
    measured: Measured | None = None

    @property
    def feasible(self) -> bool:
        return self.reason is None

    def as_dict(self) -> dict[str, Any]:
        """The row as the command line's JSON shows it."""
        plan, measured = self.plan, self.measured
        return {
            "name": self.name,
            "feasible": self.feasible,
            "reason": self.reason,
            "step_seconds": plan.step_seconds if plan else None,
            "compute_seconds": plan.compute_seconds if plan else None,
            "communication_seconds": plan.communication_seconds if plan else None,
            "peak_bytes": plan.peak_bytes if plan else None,
            "device_limit": self.device_limit,
            "measured_step_seconds": measured.seconds if measured else None,
            "measured_peak_bytes": measured.nbytes if measured else None,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows; `chosen` names the one of the solver's own plan, None if it has none that fits.

    The figures are None where nothing ran, or too little to tell. `print` it, or take `as_dict()`.
    """

    cluster: str
    memory_cap: int | None
    rows: tuple[Row, ...]
    chosen: str | None

    @property
    def is_measured(self) -> bool:
        """Whether any row ran."""
        return any(row.measured for row in self.rows)

    @property
    def accuracy(self) -> float | None:
        """Nearness of predicted step times to measured ones, from 0 to 1."""
        near = [max(0.0, 1 - abs(guess - seconds) / seconds) for guess, seconds in self._pairs()]
        return sum(near) / len(near) if near else None

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's rank correlation of predictions and measurements, from -1 to 1."""
        pairs = self._pairs()
        return spearman([guess for guess, _ in pairs], [seconds for _, seconds in pairs])

    @property
    def regret(self) -> float | None:
        """Relative excess of the chosen plan's measured seconds over the fastest row's."""
        seconds = {row.name: row.measured.seconds for row in self.rows if row.measured}
        return seconds[self.chosen] / min(seconds.values()) - 1 if self.chosen in seconds else None

    def as_dict(self) -> dict[str, Any]:
        """The comparison as the command line's JSON shows it."""
        rows = {"rows": [row.as_dict() for row in self.rows], "chosen": self.chosen}
        if not self.is_measured:
            return rows
        return rows | {
            "accuracy": self.accuracy,
            "rank_correlation": self.rank_correlation,
            "regret": self.regret,
        }

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)

    def _pairs(self) -> list[tuple[float, float]]:
        """(predicted, measured) seconds of every row that ran."""
        return [
            (row.plan.step_seconds, row.measured.seconds) for row in self.rows if row.plan and row.measured
        ]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The rank correlation of two lists of one length; None where one of them has a single value."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values have the mean of the places that they take."""
    places = sorted(values)
    return [places.index(value) + (places.count(value) + 1) / 2 for value in values]
