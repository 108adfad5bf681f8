"""What starts early in a micro-batch, and how much of it hides.

    forward     |== gather 1 ==|            gathers of weights hide behind theta of what forward computes
                |-- operator 0 --|
    backward    |== sum ==| |== scatter 1 ==|       gathers anew and scatters behind theta of backward
                |- weights 1 -| |-- operator 0 --|  a sum of what products read behind theta of their weights'
                                                    gradients

Inside of what is recomputed nothing starts early. Memory is taken to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.convert.moves import canonical, effect, gathers
from autopar.core.graph import InputKind
from autopar.cost.program.gathering import regathers
from autopar.cost.program.values import Key
from autopar.runtime.collectives.late_gradients import PRODUCTS

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram


def early_seconds(priced: PricedProgram) -> tuple[float, float]:
    """Seconds of a micro-batch's exchanges that start early, and those of them that hide."""
    prices = priced.prices
    if not (prices.early and prices.overlap):
        return 0.0, 0.0
    weights = {item.name for item in priced.graph.inputs if item.kind is InputKind.PARAMETER}
    recomputed = {place for first, stop in priced.program.recompute for place in range(first, stop)}
    behind = _behind_products(priced)
    ahead = back = sums = beside = 0.0
    for value in priced.values.of.values():
        if value.move is None or value.leads or any(place in recomputed for place in value.uses):
            continue
        before, after = prices.move_parts(value.name, value.move)
        if value.name in weights and gathers(value.move):
            ahead, back = ahead + before, back + after
        elif value.name not in weights and effect(value.move).name in ("r_to_b", "s_to_b"):
            limit = prices.overlap * behind.get((value.name, value.layout), 0.0)
            sums, beside = sums + (after if limit else 0.0), beside + min(after, limit)
    back += sum(each.seconds for each in regathers(priced) if each.place not in recomputed)
    costs = priced.operator_prices
    computed = sum(cost.compute for cost in costs)
    backward = sum(cost.behind for cost in costs)
    hidden = min(ahead, prices.overlap * (computed - backward))
    return ahead + back + sums, hidden + min(back + beside, prices.overlap * backward)


def _behind_products(priced: PricedProgram) -> dict[Key, float]:
    """Of the values that products read, the seconds of the gradients of those products' weights."""
    found: dict[Key, float] = {}
    for operator, price in zip(priced.graph.operators, priced.operator_prices, strict=True):
        if operator.target in PRODUCTS:
            name = operator.operands[0]
            layout = tuple(option.operands[0] for option in priced.program.strategies[operator.name])
            key = name, canonical(layout, differentiable=priced.graph.specs[name].requires_grad)
            found[key] = found.get(key, 0.0) + price.weights
    return found
