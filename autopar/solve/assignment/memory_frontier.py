"""Assignments where bytes have a price: the frontier of seconds and bytes.

    bytes ^ x D
          | |              least seconds + price * bytes of all assignments, one line for each price;
          |  `._   x       all assignments x lie above them, those at the corners are worth having
          |     `--x
          +-------------->  seconds

The program of problem.py is solved without integrality for one price after the other, each from the answer
before: that takes a small part of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.core.graph import Graph
from autopar.core.program import Program
from autopar.cost.operators.prices import Prices
from autopar.solve.assignment.symmetry import axes_alike, forget
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.choices.space import Space
from autopar.solve.highs import Relaxation
from autopar.solve.linear_program import SolverAnswer, Terms
from autopar.solve.program.decode import is_whole, read
from autopar.solve.program.problem import Problem

ANY = MemoryPrice(
    1e-15, 1e-15
)  # with which the program is written: so small that no digit of a second is lost
CORNERS = 8  # that are looked for
HIGHEST_PRICE = 30.0  # of all bytes of the fastest, in its own seconds: nothing that takes less is sought
APART = 1e-4  # of the seconds: nearer corners are one


@dataclass(slots=True)
class MemoryPricedProgram:
    """The placement program whose bytes may have any price; with `relaxed` for a bound on all assignments, in
    which with `recomputes` operators may be recomputed where that is cheaper."""

    graph: Graph
    prices: Prices
    space: Space
    folding: Folding
    relaxed: bool = False
    recomputes: bool = False
    problem: Problem = field(init=False)
    relaxation: Relaxation = field(init=False)
    seconds: NDArray[np.float64] = field(init=False)  # of each variable, and its bytes
    lasting: NDArray[np.float64] = field(init=False)
    saved: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        alike = axes_alike(self.prices) if self.relaxed else ()
        self.problem = problem = Problem(
            self.graph,
            self.prices,
            forget(self.space, alike) if alike else self.space,
            self.folding,
            cap=None,
            relaxed=self.relaxed,
            alike=alike,
            memory_price=ANY,
            recomputes=self.recomputes,
            copies_last=True,
        )
        count = len(problem.lp.costs)
        self.lasting = _summed(problem.memory.lasting, count)
        self.saved = _summed(problem.memory.held, count) - self.lasting
        paid: Terms = [(cost, variable) for variable, cost in problem.memory.paid.items()]
        self.seconds = np.asarray(problem.lp.costs) - _summed(paid, count)
        self.relaxation = Relaxation(problem.lp)

    def least(self, memory_price: MemoryPrice) -> float:
        """Seconds that no assignment takes less than, its bytes by their prices among them."""
        return self.solve(memory_price)[0]

    def solve(self, memory_price: MemoryPrice) -> tuple[float, tuple[float, ...]]:
        return self.relaxation.least(
            self.seconds + memory_price.state * self.lasting + memory_price.saved * self.saved
        )

    def corners(self, flight: float, most: float) -> Iterator[Program]:
        """Assignments at the frontier of seconds and bytes with `flight` micro-batches on their way. They
        come from the fastest on, as far as they take less than `most` seconds."""
        first = self.corner(0.0, flight)
        last = self.corner(HIGHEST_PRICE * first.seconds / max(1.0, first.nbytes), flight)
        found, waiting = [first, last], [(first, last)]
        while waiting and len(found) < CORNERS:
            left, right = waiting.pop()
            spared = left.nbytes - right.nbytes
            if spared <= 0 or right.seconds <= left.seconds:
                continue
            price = (right.seconds - left.seconds) / spared
            corner = self.corner(price, flight)
            gain = left.seconds + price * left.nbytes - corner.seconds - price * corner.nbytes
            if gain > APART * left.seconds:
                found.append(corner)
                waiting += [(corner, right), (left, corner)]
        for corner in sorted(found, key=lambda each: each.seconds):
            if corner.seconds < most and is_whole(self.problem, corner.answer):
                yield read(self.problem, corner.answer)

    def corner(self, price: float, flight: float) -> _Corner:
        """The assignment that is best if a byte has a price, in seconds."""
        cost, values = self.solve(MemoryPrice(state=price, saved=price * flight))
        each = np.asarray(values)
        nbytes = float(each @ self.lasting + flight * (each @ self.saved))
        return _Corner(float(each @ self.seconds), nbytes, SolverAnswer(values, cost, cost, "optimal"))


@dataclass(frozen=True, slots=True)
class _Corner:
    seconds: float
    nbytes: float
    answer: SolverAnswer


def _summed(terms: Terms, count: int) -> NDArray[np.float64]:
    found = np.zeros(count)
    for amount, variable in terms:
        found[variable] += amount
    return found
