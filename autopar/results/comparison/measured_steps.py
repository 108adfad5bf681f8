"""Measured steps beside predicted ones, as `autopar compare --measure --json` prints them.

{"rows": [{"name": "hybrid", "step_seconds": 0.0828, "measured_step_seconds": 0.0871, ...}], ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.core.user_text import parse_json, read_text
from autopar.errors import SHOWN_CHARACTERS, InputError, cut_text, show_value
from autopar.results.comparison.comparison import Comparison
from autopar.results.files.plan_laws import LARGEST_QUANTITY

FIGURES = ("step_seconds", "measured_step_seconds", "peak_bytes", "measured_peak_bytes")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A strategy whose steps ran: predicted and measured seconds and bytes."""

    name: str
    step_seconds: float
    measured_step_seconds: float
    peak_bytes: float
    measured_peak_bytes: float


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """All strategies that ran; `chosen` names the plan's own."""

    steps: tuple[MeasuredStep, ...]
    chosen: str | None

    def as_dict(self) -> dict[str, Any]:
        """The steps as the command line's JSON shows them."""
        return asdict(self) | {"steps": [asdict(step) for step in self.steps]}

    @staticmethod
    def of(comparison: Comparison) -> MeasuredSteps:
        """The steps of a comparison; raises InputError if nothing ran."""
        return _steps(comparison.as_dict(), "comparison")


def read_measured(path: str | Path) -> MeasuredSteps:
    """The steps in a file of `autopar compare --measure --json`; raises InputError for any other file."""
    try:
        document = parse_json(read_text(path))
    except ValueError as cause:
        raise _wrong(str(path), str(cause)) from cause
    return _steps(document, str(path))


def _steps(document: Any, where: str) -> MeasuredSteps:
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _wrong(where, "other JSON")
    ran = [row for row in rows if row.get("measured_step_seconds") is not None]
    if not ran:
        raise _wrong(where, "no row that ran")
    chosen = document.get("chosen")
    return MeasuredSteps(tuple(_step(row, where) for row in ran), chosen if isinstance(chosen, str) else None)


def _step(row: Mapping[str, Any], where: str) -> MeasuredStep:
    figures = {name: row.get(name) for name in FIGURES}
    for name, value in figures.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value <= LARGEST_QUANTITY
        ):
            raise _wrong(where, f"{name} {show_value(value)}")
    return MeasuredStep(cut_text(str(row.get("name")), SHOWN_CHARACTERS), **figures)  # type: ignore[arg-type]


def _wrong(where: str, found: str) -> InputError:
    return InputError(
        where=where,
        found=found,
        wanted="what autopar compare --measure --json prints",
        remedy="run autopar compare TARGET --cluster local:2 --measure --json > measured.json",
    )
