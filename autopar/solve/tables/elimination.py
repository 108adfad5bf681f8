"""Choices of a graph that is long and narrow, one eliminated after the other, without an integer program.

    linear - relu - linear - relu - ...        T(a, b) + c(b) + U(b, d)   ->   V(a, d) = min over b

A program costs what its tables say (choice_tables.py), added up. So a choice can be left out: the tables that
it is in become one of the other choices that they have, the least over it. In the end one number is left, the
least cost, and going back, each choice is the one that gave it. That is exact, so the cost is its own bound,
and linear in the number of operators as long as tables stay small: on chains and blocks with residuals, not
on dense graphs. Source: Bertelè and Brioschi, Nonserial Dynamic Programming, 1972.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from autopar.convert.network import Numbers, Seconds
from autopar.core.deadline import check_time
from autopar.core.offload import Offload
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.cost.program.priced_program import PricedProgram
from autopar.solve.program.decode import Choices, decoded
from autopar.solve.program.solution import Solution, check_cutoff, check_promise, completed
from autopar.solve.tables.choice_tables import MOST_ENTRIES, ChoiceTables, CostTable, WideError


@dataclass(frozen=True, slots=True)
class EliminatedChoice:
    """A choice that was left out, and the alternative to take, by the alternatives of `others`."""

    choice: int
    others: tuple[int, ...]
    best: Numbers


def eliminated(
    tables: ChoiceTables, *, recompute: Recompute, offload: Offload, cutoff: float = math.inf
) -> Solution:
    """The cheapest plan of all.

    Raises WideError where it can't be found so, and CutoffError if it takes no less than `cutoff` seconds.
    """
    program, cost = cheapest_program(tables)
    check_cutoff(cost, cutoff)
    priced = PricedProgram(tables.prices, program)
    check_promise(tables, priced, cost)
    solution = completed(priced, None, recompute=recompute, offload=offload)
    return replace(solution, bound=min(cost, solution.seconds), status="optimal")


def cheapest_program(problem: ChoiceTables) -> tuple[Program, float]:
    """The cheapest program, and what it costs; raises WideError where that can't be found so."""
    cost, taken = least(problem.tables(), [len(choice) for choice in problem.choices])
    if not math.isfinite(cost):
        raise WideError
    chosen = iter(taken)
    strategies = {name: problem.space.strategies[name][next(chosen)] for name in problem.operators.x}
    outputs = {name: list(layouts)[next(chosen)] for name, layouts in problem.output_layouts.items()}
    choices = Choices(strategies, problem.kept(taken), outputs, {})
    return decoded(problem, choices, cheapest=True), cost


def least(tables: Iterable[CostTable], sizes: list[int]) -> tuple[float, list[int]]:
    """The least sum of the tables, and the alternative of each choice that gives it, of `sizes[choice]`.

    The choice whose tables come to the smallest one is left out first. Raises WideError if one of them is
    larger than `MOST_ENTRIES`.
    """
    rest = _Rest(tables, sizes)
    order = [rest.eliminate(choice) for choice in rest.smallest_first()]
    taken = [0] * len(sizes)
    for each in reversed(order):
        taken[each.choice] = int(each.best[tuple(taken[other] for other in each.others)])
    return rest.constant, taken


class _Rest:
    """The tables that are left, by choice."""

    def __init__(self, tables: Iterable[CostTable], sizes: list[int]) -> None:
        self.sizes, self.constant = sizes, 0.0
        self.of: list[dict[int, CostTable]] = [{} for _ in sizes]
        self.count = 0
        for table in tables:
            self.add(table)

    def add(self, table: CostTable) -> None:
        """Add a table, without dims of one alternative."""
        table = CostTable(
            tuple(choice for choice in table.choices if self.sizes[choice] > 1), np.squeeze(table.costs)
        )
        if not table.choices:
            self.constant += float(table.costs)
        for choice in table.choices:
            self.of[choice][self.count] = table
        self.count += 1

    def others(self, choice: int) -> tuple[int, ...]:
        """The choices with which a choice shares tables."""
        shared = {other for table in self.of[choice].values() for other in table.choices}
        return tuple(sorted(shared - {choice}))

    def size(self, choice: int) -> int:
        """The entries of the table that is made to eliminate a choice."""
        return math.prod((self.sizes[choice], *(self.sizes[other] for other in self.others(choice))))

    def smallest_first(self) -> Iterable[int]:
        """The choices, each when its table is the smallest of those that are left."""
        waiting = [(self.size(choice), choice) for choice in range(len(self.sizes))]
        left = set(range(len(self.sizes)))
        heapq.heapify(waiting)
        while waiting:
            size, choice = heapq.heappop(waiting)
            if choice not in left:
                continue
            if size != (now := self.size(choice)):
                heapq.heappush(waiting, (now, choice))
                continue
            neighbors = self.others(choice)
            left.remove(choice)
            yield choice
            for other in neighbors:
                heapq.heappush(waiting, (self.size(other), other))

    def eliminate(self, choice: int) -> EliminatedChoice:
        """Leave a choice out."""
        check_time()
        others = self.others(choice)
        if self.size(choice) > MOST_ENTRIES:
            raise WideError
        tables = self.of[choice]
        scope = (*others, choice)
        total = np.zeros([self.sizes[each] for each in scope])
        for number, table in list(tables.items()):
            total += _spread(table, scope)
            for other in table.choices:
                del self.of[other][number]
        best = np.asarray(total.argmin(axis=-1), dtype=np.intp)
        self.add(CostTable(others, np.asarray(total.min(axis=-1))))
        return EliminatedChoice(choice, others, best)


def _spread(table: CostTable, scope: tuple[int, ...]) -> Seconds:
    """The table's costs with a dim for each choice of `scope`, of length 1 where it doesn't depend on it."""
    order = sorted(range(len(table.choices)), key=lambda dim: scope.index(table.choices[dim]))
    sizes = dict(zip(table.choices, table.costs.shape, strict=True))
    return table.costs.transpose(order).reshape([sizes.get(choice, 1) for choice in scope])
