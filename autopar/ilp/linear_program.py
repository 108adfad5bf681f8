"""A mixed-integer linear program as plain data: minimise cost · x, rows between bounds, 0 <= x <= upper."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

Terms = list[tuple[float, int]]  # (coefficient, variable)


@dataclass(frozen=True, slots=True)
class Row:
    """low <= sum of terms <= high; `why` names the constraint in the module that states it."""

    terms: tuple[tuple[float, int], ...]
    low: float
    high: float
    why: str


@dataclass(slots=True)
class LinearProgram:
    """Variables by number; `integer` ones take whole values unless the relaxation is solved."""

    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, integer: bool = False, upper: float = math.inf) -> int:
        self.costs.append(cost)
        self.integer.append(integer)
        self.uppers.append(upper)
        return len(self.costs) - 1

    def equal(self, terms: Iterable[tuple[float, int]], value: float, why: str) -> None:
        self.rows.append(Row(tuple(terms), value, value, why))

    def at_most(self, terms: Iterable[tuple[float, int]], value: float, why: str) -> None:
        self.rows.append(Row(tuple(terms), -math.inf, value, why))

    def at_least(self, terms: Iterable[tuple[float, int]], value: float, why: str) -> None:
        self.rows.append(Row(tuple(terms), value, math.inf, why))


@dataclass(frozen=True, slots=True)
class Answer:
    """What the solver said: values of the incumbent (None if there is none), its cost, a proven
    lower bound, and why it stopped."""

    values: tuple[float, ...] | None
    cost: float
    bound: float
    status: str  # "optimal", "gap_limit", "time_limit" or "infeasible"
