"""The bytes that variables hold: rows that cap them, and the costs that a price of memory adds.

held <= cap            when backward begins, less the gradients that come later
at the end <= cap      state and sums, when backward ends
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.linear_program import LinearProgram, Terms


class MemoryRows:
    """Terms of bytes: all that is `held` when backward begins, and of that what lasts or comes later."""

    def __init__(self, lp: LinearProgram, price: MemoryPrice) -> None:
        self.lp, self.price = lp, price
        self.held: Terms = []
        self.lasting: Terms = []  # there once, however many micro-batches are in flight
        self.resting: Terms = []  # there all step, or at its end
        self.gradients: Terms = []  # of weights, which aren't there when backward begins
        self.paid: dict[int, float] = {}  # what the price of memory adds to a variable's cost

    def within(self, lp: LinearProgram) -> MemoryRows:
        """Move the terms to a program like this one that has costs of its own."""
        other = copy.copy(self)
        other.lp = lp
        return other

    def hold(self, nbytes: float, variable: int, *, lasts: bool = False) -> None:
        """Count bytes that `variable` holds, for each micro-batch or as long as a step lasts."""
        self.held.append((float(nbytes), variable))
        if lasts:
            self.lasting.append((float(nbytes), variable))
        price = self.price.state if lasts else self.price.saved
        if price:
            self.paid[variable] = self.paid.get(variable, 0.0) + price * nbytes
            self.lp.costs[variable] += price * nbytes

    def rest(self, nbytes: float, variable: int) -> None:
        """Count bytes that `variable` holds all step, at its end too."""
        self.hold(nbytes, variable, lasts=True)
        self.resting.append((float(nbytes), variable))

    def add_gradient(self, nbytes: float, variable: int) -> None:
        """Say of bytes that are counted that a gradient of a weight takes them, after backward has begun."""
        self.gradients.append((float(nbytes), variable))

    def cap(self, nbytes: float) -> None:
        """Add rows that cap the bytes at the begin and at the end of backward."""
        later = [(-amount, variable) for amount, variable in self.gradients]
        self.lp.at_most([*self.held, *later], float(nbytes))
        if self.resting:
            self.lp.at_most(self.resting, float(nbytes))

    def cost(self, values: Sequence[float]) -> float:
        """Seconds of an answer's cost that are the price of its memory."""
        return sum(cost * values[variable] for variable, cost in self.paid.items())
