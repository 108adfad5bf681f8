"""One way to run an operator: a factor, or none, on each mesh axis, and the placements that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from autopar.core.placement import Placement


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run an operator on ONE axis: the factor (or none) and all placements."""

    factor: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

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
