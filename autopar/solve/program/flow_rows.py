"""The rows that keep a flow: into a layout goes what goes out of it, in each phase.

row          (layout, phase)     numbered phase by phase, and written as they are touched
+ in, - out  of moves, which come in arrays; of makers and users, one by one
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from autopar.solve.linear_program import LinearProgram, Numbers

ONE = -1  # stands for the constant 1 among variables


class FlowRows:
    """The rows of one flow over `size` layouts."""

    def __init__(self, lp: LinearProgram, size: int) -> None:
        self.lp, self.size = lp, size
        self.phases: dict[Hashable, int] = {}
        self.arrays: list[tuple[Numbers, Numbers, float]] = []  # rows, variables, and the amount for all
        self.rows: list[int] = []
        self.variables: list[int] = []
        self.amounts: list[float] = []
        self.constants: dict[int, float] = {}

    def add(self, layout: int, phase: Hashable, terms: Sequence[tuple[float, int]]) -> None:
        """Add terms to a row; those of the constant 1 go to its other side."""
        row = layout + self.offset(phase)
        self.constants.setdefault(row, 0.0)
        for amount, variable in terms:
            if variable == ONE:
                self.constants[row] -= amount
                continue
            self.rows.append(row)
            self.variables.append(variable)
            self.amounts.append(amount)

    def carry(self, sources: Numbers, targets: Numbers, phase: Hashable, variables: Numbers) -> None:
        """Add flow out of `sources` and into `targets`."""
        offset = self.offset(phase)
        self.arrays += [(sources + offset, variables, -1.0), (targets + offset, variables, 1.0)]

    def offset(self, phase: Hashable) -> int:
        return self.size * self.phases.setdefault(phase, len(self.phases))

    def touched(self, phase: Hashable) -> list[int]:
        """The layouts whose rows in this phase have something."""
        first = self.offset(phase)
        found = self.numbers()
        own = found[(found >= first) & (found < first + self.size)] - first
        return [int(layout) for layout in own]

    def numbers(self) -> Numbers:
        singles = np.array([*self.rows, *self.constants], dtype=np.intp)
        return np.unique(np.concatenate([singles, *(rows for rows, _, _ in self.arrays)]))

    def write(self) -> None:
        """Write the rows down in the program."""
        touched = self.numbers()
        values = [self.constants.get(row, 0.0) for row in touched.tolist()]
        number = np.full(self.size * len(self.phases), -1)
        number[touched] = self.lp.between(values, values)
        self.lp.enter(number[self.rows], self.variables, self.amounts)
        for rows, variables, amount in self.arrays:
            self.lp.enter(number[rows], variables, amount)
