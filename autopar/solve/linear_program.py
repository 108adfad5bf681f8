"""A mixed-integer linear program as plain data: minimise cost · x, rows between bounds, 0 <= x <= upper.

**Digits.** A solver counts in floating point: beside costs of 1000 those of 1e-7 are nothing to it, and by
what it takes for nothing it may call a program unbounded. So no objective spans more than `COST_DIGITS`
digits: costs that are smaller than that beside the largest, like `ties`, only decide among answers whose
other costs are equal, in a second solve. Nor has a row a coefficient beyond `LARGEST_COEFFICIENT` when it
is handed over: rows of bytes have a unit of their own, in which none is beyond 1, as what a solver takes
for nothing is the same in all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

COST_DIGITS = 9  # that the costs of one objective may span
LARGEST_COEFFICIENT = 1e3
Terms = list[tuple[float, int]]  # (coefficient, variable)
Numbers: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The rows' coefficients: those of row r are at starts[r] to starts[r + 1], one for a variable.

    Row r is between lows[r] and highs[r]."""

    starts: Numbers
    variables: Numbers
    coefficients: NDArray[np.float64]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]

    def in_units(self) -> Matrix:
        """The matrix whose rows of large coefficients are divided by a power of 2, which rounds nothing."""
        lengths = np.diff(self.starts)
        largest = np.zeros(len(self.lows))
        np.maximum.at(largest, np.repeat(np.arange(len(lengths)), lengths), np.abs(self.coefficients))
        _, exponents = np.frexp(largest)
        units = np.where(largest > LARGEST_COEFFICIENT, np.ldexp(1.0, exponents), 1.0)
        scaled = self.coefficients / np.repeat(units, lengths)
        return replace(self, coefficients=scaled, lows=self.lows / units, highs=self.highs / units)


@dataclass(slots=True)
class LinearProgram:
    """Variables and rows by number; `integer` variables take whole values unless the relaxation is solved.

    Coefficients are kept as they come, by row; what a row has twice of a variable adds up. `ties`, if there
    are any, are the costs that decide among answers of equal cost. Programs that differ by their costs alone
    share `solved`, in which the solver keeps where it ended.
    """

    costs: list[float] = field(default_factory=list)
    ties: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    rows: list[Numbers] = field(default_factory=list)
    columns: list[Numbers] = field(default_factory=list)
    coefficients: list[NDArray[np.float64]] = field(default_factory=list)
    solved: list[object] = field(default_factory=list, compare=False, repr=False)

    def variable(self, cost: float = 0.0, *, integer: bool = False, upper: float = math.inf) -> int:
        self.costs.append(cost)
        self.integer.append(integer)
        self.uppers.append(upper)
        return len(self.costs) - 1

    def variables(self, costs: NDArray[np.float64]) -> Numbers:
        """Add one continuous variable for each cost."""
        first, count = len(self.costs), len(costs)
        self.costs.extend(costs.tolist())
        self.integer.extend([False] * count)
        self.uppers.extend([math.inf] * count)
        return np.arange(first, first + count)

    def between(self, lows: Iterable[float], highs: Iterable[float]) -> Numbers:
        """Add rows without coefficients yet."""
        first = len(self.lows)
        self.lows.extend(lows)
        self.highs.extend(highs)
        return np.arange(first, len(self.lows))

    def enter(self, rows: ArrayLike, variables: ArrayLike, coefficients: ArrayLike) -> None:
        """Add coefficients to rows, one by one or one number for all."""
        rows = np.asarray(rows, dtype=np.intp)
        self.rows.append(rows)
        self.columns.append(np.asarray(variables, dtype=np.intp))
        self.coefficients.append(np.broadcast_to(np.asarray(coefficients, dtype=np.float64), rows.shape))

    def equal(self, terms: Iterable[tuple[float, int]], value: float) -> None:
        self.row(terms, value, value)

    def at_most(self, terms: Iterable[tuple[float, int]], value: float) -> None:
        self.row(terms, -math.inf, value)

    def at_least(self, terms: Iterable[tuple[float, int]], value: float) -> None:
        self.row(terms, value, math.inf)

    def row(self, terms: Iterable[tuple[float, int]], low: float, high: float) -> None:
        """Add the row low <= sum of terms <= high."""
        pairs = list(terms)
        (number,) = self.between([low], [high])
        self.enter(
            [number] * len(pairs), [variable for _, variable in pairs], [amount for amount, _ in pairs]
        )

    def can_fall_for_ever(self) -> bool:
        """Whether a variable with a negative cost is unbounded: only then can there be no least cost."""
        return any(
            cost < 0 and math.isinf(upper) for cost, upper in zip(self.costs, self.uppers, strict=True)
        )

    def of_few_digits(self) -> LinearProgram:
        """The program whose costs span few digits; smaller ones are its ties, unless it has others."""
        least = 10.0**-COST_DIGITS * max(map(abs, self.costs), default=0.0)
        if not any(0 < cost < least for cost in self.costs):
            return self
        small = [cost if 0 < cost < least else 0.0 for cost in self.costs]
        rest = [cost - part for cost, part in zip(self.costs, small, strict=True)]
        return replace(self, costs=rest, ties=self.ties or small)

    def cost_of_ties(self, values: Iterable[float]) -> float:
        """Cost of ties in an answer. No other answer can spare more of it, as none is below 0."""
        return sum(abs(tie) * value for tie, value in zip(self.ties, values, strict=False) if tie)

    def for_ties(self, cost: float) -> LinearProgram:
        """The program whose costs are the ties, of answers that cost no more than `cost`."""
        shared = ("lows", "highs", "rows", "columns", "coefficients")
        copies = {name: list(getattr(self, name)) for name in shared}
        program = replace(self, costs=self.ties, ties=[], solved=[], **copies)
        program.at_most([(each, place) for place, each in enumerate(self.costs) if each], cost)
        return program

    def cost_of(self, values: Iterable[float]) -> float:
        return sum(cost * value for cost, value in zip(self.costs, values, strict=True))

    def matrix(self) -> Matrix:
        """All coefficients, by row and then by variable."""
        size = len(self.costs)
        keys = np.concatenate(self.rows) * size + np.concatenate(self.columns)
        places, back = np.unique(keys, return_inverse=True)
        summed = np.zeros(len(places))
        np.add.at(summed, back, np.concatenate(self.coefficients))
        rows, variables = np.divmod(places, size)
        starts = np.searchsorted(rows, np.arange(len(self.lows) + 1))
        lows, highs = (np.asarray(ends, dtype=np.float64) for ends in (self.lows, self.highs))
        return Matrix(starts, variables, summed, lows, highs)


@dataclass(frozen=True, slots=True)
class SolverAnswer:
    """Answer of the solver: values of the incumbent (None if there is none), its cost, a proven lower bound,
    and why it stopped; of a relaxation also the variables' reduced costs, by which its bound rises where they
    are 1 instead of 0. `work` is what the solver did for it; see highs.py."""

    values: tuple[float, ...] | None
    cost: float
    bound: float
    status: str  # "optimal", "gap_limit", "time_limit" or "infeasible"
    reduced: tuple[float, ...] = ()
    work: float = 0.0
