"""The cheapest program where bytes have a price, found by elimination.

At a price at which no seconds count beside a byte it is the one that holds fewest bytes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.core.offload import Offload
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import RuleError
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.program.decode import Choices, decoded
from autopar.solve.program.solution import Solution, check_cutoff, check_promise, completed
from autopar.solve.tables.choice_tables import WideError
from autopar.solve.tables.elimination import least
from autopar.solve.tables.memory_tables import Chosen, MemoryTables

DEAREST = MemoryPrice(1.0, 1.0)  # seconds: of a byte as much as of a whole step


def eliminated_at(
    tables: MemoryTables,
    price: MemoryPrice,
    *,
    recompute: Recompute,
    offload: Offload,
    cutoff: float = math.inf,
) -> Solution:
    """The cheapest plan of all by seconds and bytes together; its bound on seconds is none where bytes have a
    price.

    Raises WideError where it can't be found so, and without a price CutoffError if it takes no less than
    `cutoff` seconds.
    """
    program, cost = cheapest_at(tables, price, recomputes=recompute is not Recompute.NONE)
    priced = PricedProgram(tables.prices, program)
    if price != FREE:
        return completed(priced, None, recompute=recompute, offload=offload)
    check_cutoff(cost, cutoff)
    check_promise(tables, priced, cost)
    solution = completed(priced, None, recompute=recompute, offload=offload)
    return replace(solution, bound=min(cost, solution.seconds), status="optimal")


def cheapest_at(tables: MemoryTables, price: MemoryPrice, *, recomputes: bool) -> tuple[Program, float]:
    """The cheapest program where bytes have a price, and what it costs; with `recomputes` what is saved costs
    no more than to compute it again. Raises WideError where it can't be found so."""
    costs = tables.costs_at(price)
    own = tables.tables_at(costs, price, recomputes=recomputes)
    cost, taken = least(own, list(map(len, tables.choices)))
    if not math.isfinite(cost):
        raise WideError
    try:
        return program_of(tables, tables.chosen(taken, costs, price)), cost
    except RuleError as error:
        raise WideError from error


def program_of(tables: MemoryTables, chosen: Chosen) -> Program:
    """The program of these choices."""
    taken = iter(chosen.taken)
    strategies = {name: tables.space.strategies[name][next(taken)] for name in tables.operators.x}
    outputs = {name: list(layouts)[next(taken)] for name, layouts in tables.output_layouts.items()}
    return decoded(tables, Choices(strategies, tables.stored_ways(chosen), outputs, {}), cheapest=True)
