"""What starts early in a micro-batch, and how much of it hides.

    forward     |== gather 1 ==|            gathers of weights hide behind theta of what forward computes
                |-- operator 0 --|
    backward    |== sum ==| |== scatter 1 ==|       gathers anew and scatters behind theta of backward
                |- weights 1 -| |-- operator 0 --|  a sum of what products read behind theta of their weights'
                                                    gradients

Inside of what is recomputed nothing starts early. Memory is taken to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.convert.moves import canonical, effect, gathers
from autopar.core.graph import InputKind
from autopar.core.timeline import Phase
from autopar.cost.program.gathering import regathers
from autopar.cost.program.values import Key
from autopar.runtime.collectives.late_gradients import PRODUCTS

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram


@dataclass(frozen=True, slots=True)
class EarlyExchange:
    """An exchange of one micro-batch that starts early, at the operator that waits for it: at most so many of
    its `seconds` hide."""

    phase: Phase
    place: int
    seconds: float
    limit: float


def early_seconds(priced: PricedProgram) -> tuple[float, float]:
    """Seconds of a micro-batch's exchanges that start early, and those of them that hide."""
    return _early_seconds(priced) if priced.prices.early else (0.0, 0.0)


def could_hide(priced: PricedProgram) -> float:
    """Seconds of a micro-batch that would hide if exchanges started early, which they don't."""
    return 0.0 if priced.prices.early else _early_seconds(priced)[1]


def _early_seconds(priced: PricedProgram) -> tuple[float, float]:
    exchanges = list(early_exchanges(priced))
    return sum(each.seconds for each in exchanges), sum(_hidden(priced, exchanges).values())


def hidden_seconds(priced: PricedProgram) -> dict[tuple[Phase, int], float]:
    """Seconds of a micro-batch that hide, by phase and operator; they add up to `StepCost.beside`. What hides
    of a phase is taken from its exchanges in proportion to what could."""
    found = defaultdict[tuple[Phase, int], float](float)
    if not priced.cost.beside:
        return found
    exchanges = list(early_exchanges(priced))
    hidden = _hidden(priced, exchanges)
    room = priced.cost.beside / sum(hidden.values())
    for phase, seconds in hidden.items():
        could = sum(each.limit for each in exchanges if each.phase is phase)
        for each in exchanges:
            if each.phase is phase and could:
                found[phase, each.place] += room * seconds * each.limit / could
    return found


def early_exchanges(priced: PricedProgram) -> Iterator[EarlyExchange]:
    """The exchanges that may start early; of sums what waits behind gradients of one product's weights."""
    prices = priced.prices
    if not prices.overlap:
        return
    weights = {item.name for item in priced.graph.inputs if item.kind is InputKind.PARAMETER}
    recomputed = {place for first, stop in priced.program.recompute for place in range(first, stop)}
    behind = _behind_products(priced)
    for value in priced.values.of.values():
        if value.move is None or value.leads or any(place in recomputed for place in value.uses):
            continue
        before, after = priced.move_parts(value)
        place = priced.place_of(value)
        if value.name in priced.program.on_host:  # its gather waits for its fetch
            continue
        if value.name in weights and gathers(value.move):
            yield EarlyExchange(Phase.FORWARD, place, before, before)
            yield EarlyExchange(Phase.BACKWARD, place, after, after)
        elif value.name not in weights and effect(value.move).name in ("r_to_b", "s_to_b"):
            limit = prices.overlap * behind.get((value.name, value.layout), 0.0)
            if limit:
                yield EarlyExchange(Phase.BACKWARD, place, after, min(after, limit))
    for each in regathers(priced):
        if each.place not in recomputed:
            yield EarlyExchange(Phase.BACKWARD, each.place, each.seconds, each.seconds)


def _hidden(priced: PricedProgram, exchanges: Sequence[EarlyExchange]) -> dict[Phase, float]:
    """Seconds that hide in each phase, behind what it computes."""
    costs = priced.operator_prices
    backward = sum(cost.behind for cost in costs)
    computed = {Phase.FORWARD: sum(cost.compute for cost in costs) - backward, Phase.BACKWARD: backward}
    return {
        phase: min(
            sum(each.limit for each in exchanges if each.phase is phase), priced.prices.overlap * seconds
        )
        for phase, seconds in computed.items()
    }


def _behind_products(priced: PricedProgram) -> dict[Key, float]:
    """Seconds of the gradients of products' weights, by the values that these products read."""
    found: dict[Key, float] = {}
    for operator, price in zip(priced.graph.operators, priced.operator_prices, strict=True):
        if operator.target in PRODUCTS:
            name = operator.operands[0]
            layout = tuple(option.operands[0] for option in priced.program.strategies[operator.name])
            key = name, canonical(layout, differentiable=priced.graph.specs[name].requires_grad)
            found[key] = found.get(key, 0.0) + price.weights
    return found
