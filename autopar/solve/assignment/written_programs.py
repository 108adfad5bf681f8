"""Programs that are written already: under other multipliers of what hides only their costs differ.

    max over multipliers of   min over assignments of   costs under the multiplier        (whole_step.py)

To write a program takes longer than to solve its relaxation. Rows, variables and moves of all these programs
are the same, so each is written once, and is given other costs from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autopar.core.graph import Graph
from autopar.core.placement import Layout
from autopar.cost.operators.prices import Prices
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.memory_price import FREE
from autopar.solve.choices.space import Space
from autopar.solve.program.problem import Problem
from autopar.solve.tables.choice_tables import ChoiceTables, WideError
from autopar.solve.tables.memory_tables import UNPRICED, MemoryTables

REMEMBERED_PROGRAMS = 4  # of one mesh with names and without, folded and relaxed


class WrittenPrograms:
    """Programs of one graph on one mesh under several multipliers, the latest ones."""

    def __init__(self) -> None:
        self.known: dict[object, Problem] = {}
        self.known_tables: tuple[object, Space, ChoiceTables | None] | None = None
        self.known_memory: tuple[object, Space, MemoryTables | None] | None = None
        self.row_prices = UNPRICED  # the best that are known of bytes under a cap

    def tables(self, graph: Graph, prices: Prices, space: Space, folding: Folding) -> ChoiceTables:
        """Tables, made once for all multipliers as programs are; raises WideError where there are none."""
        key = _content(space, prices)
        if self.known_tables is not None and self.known_tables[0] == key and not prices.early:
            _, _, known = self.known_tables
            if known is None:
                raise WideError
            tables = known.under(prices)
        else:
            self.known_tables = key, space, None  # whose strategies stay, and so their identities
            tables = ChoiceTables(graph, prices, space, folding)
        self.known_tables = key, space, tables
        return tables

    def memory_tables(
        self, graph: Graph, prices: Prices, space: Space, folding: Folding, *, offloads: bool
    ) -> MemoryTables:
        """Tables in which bytes have a price, made once as well."""
        key = _content(space, prices), offloads
        if self.known_memory is not None and self.known_memory[0] == key:
            _, _, known = self.known_memory
            if known is None:
                raise WideError
            tables = known if known.prices is prices else known.under(prices)
        else:
            self.known_memory = key, space, None
            tables = MemoryTables(graph, prices, space, folding, offloads=offloads)
        self.known_memory = key, space, tables
        return tables

    def problem(self, graph: Graph, prices: Prices, space: Space, folding: Folding, **how: Any) -> Problem:
        """The program that `Problem` writes, from one that differs by its costs alone if there is one."""
        if prices.early or how.get("memory_price", FREE) != FREE:  # other costs depend on multipliers, too
            return Problem(graph, prices, space, folding, **how)
        key = _content(space, prices), tuple(sorted(how.items(), key=lambda item: item[0]))
        found = self.known.pop(key, None)
        if found is None:
            found = Problem(graph, prices, space, folding, **how)
        elif found.prices is not prices:
            found = found.under(prices)
        self.known[key] = found
        while len(self.known) > REMEMBERED_PROGRAMS:
            del self.known[next(iter(self.known))]
        return found


def _content(space: Space, prices: Prices) -> object:
    """Equal for spaces of the same choices, with the same weights on the device.

    Strategies are those of one mesh, which lists share."""
    strategies = tuple(tuple(map(id, each)) for each in space.strategies.values())
    return strategies, _ends(space.inputs), _ends(space.outputs), space.gatherings, prices.on_host


def _ends(layouts: Mapping[str, Iterable[Layout]]) -> object:
    return tuple((name, tuple(each)) for name, each in layouts.items())
