"""One way to run an operator: a factor, or none, on each mesh axis, and the placements that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from autopar.core.placement import Layout, Placement

_KNOWN_OPTIONS: dict[tuple[str, Layout, Layout], Option] = {}  # few: they have no sizes


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way to run an operator on ONE axis: the factor (or none) and all placements; equal ones are one
    object."""

    factor: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

    def __new__(cls, factor: str, operands: Layout, results: Layout) -> Option:
        key = factor, operands, results
        found = _KNOWN_OPTIONS.get(key)
        return _KNOWN_OPTIONS.setdefault(key, object.__new__(cls)) if found is None else found

    def __reduce__(self) -> tuple[type, tuple[str, Layout, Layout]]:
        return Option, (self.factor, self.operands, self.results)

    @property
    def shards(self) -> bool:
        return self.factor not in UNSHARDED

    def __str__(self) -> str:
        return self.factor


GATHERED = "-"  # takes and gives R
UNSUMMED = "-b"  # takes and gives B throughout: an unsummed gradient travels on
PARTIAL = "-p"  # a linear operator that passes a partial sum on
UNSHARDED = (GATHERED, UNSUMMED, PARTIAL)

Strategy: TypeAlias = tuple[Option, ...]  # one option for each mesh axis
