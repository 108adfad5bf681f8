"""Variables of operators: x[v,s] says how each runs, r[v,s] whether it runs again in backward.

Operators of one class share theirs. In the relaxation of folding x is the mean over the members, and the
first and the last of them may have an x of their own (problem.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.convert.network import Alike, unnamed
from autopar.core.graph import Graph
from autopar.core.placement import Broadcast, Layout, R
from autopar.cost.operators.prices import Prices
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.space import Space
from autopar.solve.choices.tensor_classes import Marginal
from autopar.solve.linear_program import LinearProgram, Terms
from autopar.solve.program.memory_rows import MemoryRows


def value_of(layout: Layout, alike: Alike) -> Layout:
    """The layout of a value alone, of which one copy serves: R and B hold the same."""
    return unnamed(tuple(R if isinstance(item, Broadcast) else item for item in layout), alike)


@dataclass(frozen=True, slots=True)
class View:
    """A result as a view of the operand at `place`: the operand's layout, the result's, and the variables x
    of the strategies that make it so."""

    maker: str
    place: int
    operand: Layout
    result: Layout
    variables: tuple[int, ...]


class OperatorVariables:
    """x, and where `add_recompute` was called r, for each class of operators and each of its strategies."""

    def __init__(
        self,
        graph: Graph,
        prices: Prices,
        space: Space,
        folding: Folding,
        *,
        lp: LinearProgram,
        memory: MemoryRows,
        relaxed: bool,
        alike: Alike,
    ) -> None:
        self.graph, self.prices, self.space, self.folding = graph, prices, space, folding
        self.lp, self.memory, self.relaxed, self.alike = lp, memory, relaxed, alike
        self.by_name = {item.name: item for item in graph.operators}
        self.members: dict[str, list[str]] = {}
        for item in graph.operators:
            self.members.setdefault(folding.class_of[item.name], []).append(item.name)
        self.x: dict[str, list[int]] = {}
        self.r: dict[str, list[int]] = {}
        self.ends: dict[tuple[str, int], list[int]] = {}
        self.sizes: dict[tuple[str, int], dict[Layout, int]] = {}  # of the storages of results
        self.add_operators()

    def add_operators(self) -> None:
        parts: list[tuple[float, ...]] = []
        for name, members in self.members.items():
            operation = self.by_name[name]
            prices = [self.prices.plain(operation, item) for item in self.space.strategies[name]]
            parts += [
                tuple(len(members) * each for each in (price.seconds, *price.hiding)) for price in prices
            ]
            self.x[name] = [self.lp.variable(integer=True, upper=1.0) for _ in prices]
            self.lp.equal([(1.0, variable) for variable in self.x[name]], 1.0)
            for price, variable in zip(prices, self.x[name], strict=True):
                if price.saved.extra_bytes:
                    self.memory.hold(price.saved.extra_bytes * len(members), variable)
        self.variables = [variable for variables in self.x.values() for variable in variables]
        self.parts = np.array(parts, dtype=np.float64).reshape(len(parts), -1)
        self.write_costs()

    def write_costs(self) -> None:
        """Write what each variable costs by these prices: its seconds less the credit for what hides, and the
        price of the memory that it holds."""
        seconds, *hiding = self.parts.T
        costs = seconds - sum(credit * each for credit, each in zip(self.prices.credits, hiding, strict=True))
        for variable, cost in zip(self.variables, costs.tolist(), strict=True):
            self.lp.costs[variable] = cost + self.memory.paid.get(variable, 0.0)

    def under(self, prices: Prices, lp: LinearProgram) -> OperatorVariables:
        """Move the variables to a program like this one, at other prices."""
        other = copy.copy(self)
        other.prices, other.lp = prices, lp
        other.write_costs()
        return other

    def add_recompute(self) -> None:
        """Add r of every strategy."""
        for name, members in self.members.items():
            operation = self.by_name[name]
            costs = [self.prices.operator(operation, item) for item in self.space.strategies[name]]
            self.r[name] = [self.lp.variable(cost.recompute * len(members), upper=1.0) for cost in costs]
            for cost, x, r in zip(costs, self.x[name], self.r[name], strict=True):
                self.lp.at_least([(1.0, x), (-1.0, r)], 0.0)
                if cost.saved.extra_bytes:
                    self.memory.hold(-cost.saved.extra_bytes * len(members), r)

    def recompute_cost(self, values: Sequence[float]) -> float:
        """Seconds of an answer's cost that are spent on recomputing, without the price of memory."""
        costs, paid = self.lp.costs, self.memory.paid
        return sum((costs[r] - paid.get(r, 0.0)) * values[r] for each in self.r.values() for r in each)

    def mean(self, name: str, repetitions: frozenset[int]) -> list[Terms]:
        """For each strategy of a class the terms of x, averaged over some of its repetitions."""
        count = len(self.members[name])
        everyone = frozenset(range(count))
        if not self.relaxed or count == 1 or repetitions == everyone:
            return [[(1.0, variable)] for variable in self.x[name]]
        missing = everyone - repetitions
        if len(repetitions) == 1:
            return [[(1.0, variable)] for variable in self.end(name, min(repetitions))]
        if not missing <= {0, count - 1}:  # not met so far: a free distribution is a valid relaxation
            return [[(1.0, variable)] for variable in self.end(name, -1 - min(missing))]
        absent = [self.end(name, which) for which in sorted(missing)]
        taken = float(len(repetitions))
        return [
            [(count / taken, variable), *((-1.0 / taken, end[index]) for end in absent)]
            for index, variable in enumerate(self.x[name])
        ]

    def end(self, name: str, repetition: int) -> list[int]:
        """The x of one repetition alone, in the relaxation."""
        key = (name, repetition)
        if key not in self.ends:
            self.ends[key] = [self.lp.variable(upper=1.0) for _ in self.x[name]]
            self.lp.equal([(1.0, variable) for variable in self.ends[key]], 1.0)
            count = float(len(self.members[name]))
            if repetition >= 0:
                for whole, part in zip(self.x[name], self.ends[key], strict=True):
                    self.lp.at_least([(count, whole), (-1.0, part)], 0.0)
        return self.ends[key]

    def repetitions(self, operations: Iterable[str]) -> frozenset[int]:
        return frozenset(self.folding.repetition.get(name, 0) for name in operations)

    def recomputed_result(self, name: str, index: int) -> Marginal:
        """Recompute variables of the strategies that give a result storage, by layout; without results that
        recomputing holds."""
        found: Marginal = {}
        if name in self.r:
            for strategy, r in zip(self.space.strategies[name], self.r[name], strict=True):
                saved = self.prices.operator(self.by_name[name], strategy).saved
                if index not in saved.held and saved.aliases[index] is None:
                    layout = value_of(tuple(option.results[index] for option in strategy), self.alike)
                    found.setdefault(layout, []).append((1.0, r))
        return found

    def views(self, name: str, index: int) -> list[View]:
        """Views as which a class of operators makes a result."""
        found: dict[tuple[int, Layout, Layout], list[int]] = {}
        for strategy, variable in zip(self.space.strategies[name], self.x[name], strict=True):
            place = self.prices.operator(self.by_name[name], strategy).saved.aliases[index]
            if place is not None:
                operand = value_of(tuple(option.operands[place] for option in strategy), self.alike)
                result = value_of(tuple(option.results[index] for option in strategy), self.alike)
                found.setdefault((place, operand, result), []).append(variable)
        return [View(name, *ends, tuple(variables)) for ends, variables in found.items()]

    def storage_sizes(self, name: str, index: int) -> dict[Layout, int]:
        """The least bytes of storage for a result, by layout; views of operands need none."""
        if (name, index) not in self.sizes:
            self.sizes[name, index] = self.find_sizes(name, index)
        return self.sizes[name, index]

    def find_sizes(self, name: str, index: int) -> dict[Layout, int]:
        """Find `storage_sizes`, which are made once."""
        found: dict[Layout, int] = {}
        for strategy in self.space.strategies[name]:
            saved = self.prices.plain(self.by_name[name], strategy).saved
            if saved.aliases[index] is None:
                layout = value_of(tuple(option.results[index] for option in strategy), self.alike)
                found[layout] = min(found.get(layout, saved.sizes[index]), saved.sizes[index])
        return found

    def savers(self, name: str, position: int, repetitions: frozenset[int], *, of: str) -> Marginal:
        """For each layout the strategies of some repetitions that save one operand, or result, in it."""
        found: Marginal = {}
        operation = self.by_name[name]
        for strategy, terms in zip(self.space.strategies[name], self.mean(name, repetitions), strict=True):
            saved = self.prices.operator(operation, strategy).saved
            if position in (saved.operands if of == "operands" else saved.results):
                places = (getattr(option, of)[position] for option in strategy)
                found.setdefault(value_of(tuple(places), self.alike), []).extend(terms)
        return found
