"""Multipliers of what hides: each next one is where the lines of known assignments meet.

    D(m) = min over assignments of  a + m b         a  seconds without sums of gradients
                                                    b  by how much sums exceed what hides them

    D |      . .  line of one whose sums show (b > 0)
      |    .     .
      |  .         .  line of one whose sums hide (b < 0)
      +-0-----------1--- m

An assignment takes a + max(0, b), and no assignment less than D(m), for m in [0, 1]. Every one that is found
gives a line that D lies below. Where the lowest lines meet highest is the most that D can be, so it is solved
there next; if nothing new is found, that is the best bound (Kelley's cutting planes, 1960, in one dimension).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

MULTIPLIER_TOLERANCE = 1e-6  # multipliers that differ by less are the same


@dataclass(frozen=True, slots=True)
class LagrangianLine:
    """Seconds of an assignment as a line over the multiplier."""

    base: float
    excess: float

    def at(self, multiplier: float) -> float:
        return self.base + multiplier * self.excess


def line_of(multiplier: float, *, cost: float, seconds: float, shows: bool) -> LagrangianLine:
    """The line of an assignment that takes `seconds`, has this `cost` under a multiplier, and whose sums show
    or hide; level where the multiplier is the end at which both are the same."""
    if shows:
        excess = (seconds - cost) / (1.0 - multiplier) if multiplier < 1.0 else 0.0
        return LagrangianLine(seconds - excess, excess)
    return LagrangianLine(seconds, (cost - seconds) / multiplier if multiplier > 0.0 else 0.0)


def highest(lines: Sequence[LagrangianLine]) -> tuple[float, float]:
    """The multiplier at which the lowest of the lines is highest, and how high; the greatest if several."""
    ends = [0.0, 1.0]
    for one, other in itertools.combinations(lines, 2):
        if one.excess != other.excess:
            ends.append((other.base - one.base) / (one.excess - other.excess))
    values = [(min(line.at(end) for line in lines), end) for end in ends if 0.0 <= end <= 1.0]
    value, multiplier = max(values)
    return multiplier, value


@dataclass(slots=True)
class MultiplierSearch:
    """The `multiplier` to solve for next: 1 and then, as a rule, 0 and where lines meet.

    It is over where the bound can't rise by more than the `gap`, relatively. Where several things hide
    behind several others costs are no lines: then it `bisects` by whether they hide in the answer.
    """

    gap: float
    bisects: bool = False
    multiplier: float = 1.0
    is_over: bool = False
    lines: list[LagrangianLine] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)
    low: float = 0.0
    high: float = 1.0

    def note(self, cost: float, seconds: float, *, shows: bool) -> None:
        """Note the result under the multiplier: its cost there, its seconds, and whether sums show."""
        self.tried.append(self.multiplier)
        self.low, self.high = (self.multiplier, self.high) if shows else (self.low, self.multiplier)
        if self.bisects:
            self.multiplier = 0.0 if len(self.tried) == 1 else (self.low + self.high) / 2
            return
        self.costs.append(cost)
        self.lines.append(line_of(self.multiplier, cost=cost, seconds=seconds, shows=shows))
        self.multiplier, value = highest(self.lines)
        known = any(abs(self.multiplier - other) < MULTIPLIER_TOLERANCE for other in self.tried)
        self.is_over = known or value - max(self.costs) <= self.gap * value
