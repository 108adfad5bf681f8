"""Weights that are stored in shards: what their gathering costs beside the moves, and what stays of it.

once      [ shard | full copy | sum of full gradients ]  all step long; moves that lead count once a step
keep      [ shard ] + full copy from forward to backward
regather  [ shard ]; each operator whose backward reads the full copy gathers it anew
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.convert.moves import canonical, gathers
from autopar.core.gathering import Gathering
from autopar.core.placement import Layout
from autopar.cost.operators.prices import Prices
from autopar.cost.program.values import Value, Values

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram


@dataclass(frozen=True, slots=True)
class Regather:
    """The operator at `place` gathers weight `name` anew in its backward pass, which takes `seconds`."""

    place: int
    name: str
    seconds: float


def regathers(priced: PricedProgram) -> Iterator[Regather]:
    """Gathers that a micro-batch's backward repeats, operator by operator."""
    prices, program = priced.prices, priced.program
    regathered = {name for name in program.gatherings if program.gathering(name) is Gathering.REGATHER}
    if not prices.training or not regathered:
        return
    values = priced.values
    for place, item in enumerate(priced.graph.operators):
        strategy = program.strategies[item.name]
        for index, name in enumerate(item.operands):
            if name in regathered and index in prices.operator(item, strategy).saved.operands:
                layout = tuple(option.operands[index] for option in strategy)
                requires_grad = priced.graph.specs[name].requires_grad
                value = values.of[name, canonical(layout, differentiable=requires_grad)]
                seconds = sum(
                    priced.move_parts(each)[0]
                    for each in _path(value, values)
                    if each.move is not None and gathers(each.move)
                )
                yield Regather(place, name, seconds)


def copies(priced: PricedProgram) -> Mapping[str, Value]:
    """The full copies that stay all step long, by weight: the last of the gathers that lead."""
    program = priced.program
    settled = {name for name in program.gatherings if program.gathering(name) is Gathering.ONCE}
    if not settled:
        return {}
    values = priced.values
    led = [value for value in values.of.values() if value.name in settled and value.leads and value.move]
    sources = {(value.name, value.move.source) for value in led if value.move}
    last = [value for value in led if (value.name, value.layout) not in sources]
    return {value.name: value for value in last if any(_is_gathered(each) for each in _path(value, values))}


def copy_bytes(prices: Prices, name: str, layout: Layout) -> int:
    """Bytes of a full copy and, if gradients of several micro-batches or of a stage add up, of their sum."""
    adds_up = prices.training and prices.graph.specs[name].requires_grad and prices.step_weight < 1.0
    return prices.local_bytes(name, layout) * (2 if adds_up else 1)


def _is_gathered(value: Value) -> bool:
    return value.move is not None and gathers(value.move)


def _path(value: Value, values: Values) -> Iterator[Value]:
    """The value and those that it was made of."""
    yield value
    while value.move is not None:
        value = values.of[value.name, value.move.source]
        yield value
