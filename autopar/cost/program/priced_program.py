"""A program with its prices: what is derived from the two is derived once, when somebody asks for it.

PricedProgram(prices, program)  ->  values  ->  tape  ->  peak
`->  cost
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.core.graph import Graph, InputKind
from autopar.core.offload import OffloadedTensor
from autopar.core.placement import Layout
from autopar.core.program import Program
from autopar.core.recompute import Segment
from autopar.cost.operators.price import Price
from autopar.cost.operators.prices import Prices
from autopar.cost.program.grouped_gathers import gathered_together, grouped_seconds
from autopar.cost.program.peak_memory import Peak, peak_memory
from autopar.cost.program.step import StepCost, step_cost
from autopar.cost.program.tape import Tape, record
from autopar.cost.program.values import Value, Values, find_values


@dataclass(frozen=True, eq=False)
class PricedProgram:
    """A program of one mesh, and the prices of the graph that it runs. `base` is one that differs from it in
    remedies alone: it has the same values and the same tape."""

    prices: Prices
    program: Program
    base: PricedProgram | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prices", self.prices.hosting(self.program.on_host))

    @property
    def graph(self) -> Graph:
        """The graph of one micro-batch."""
        return self.prices.graph

    @cached_property
    def operator_prices(self) -> list[Price]:
        """The price of each operator, in order."""
        if self.base:
            return self.base.operator_prices
        strategies = self.program.strategies
        return [self.prices.operator(item, strategies[item.name]) for item in self.graph.operators]

    @cached_property
    def values(self) -> Values:
        """The program's tensors, in every layout that they take."""
        if self.base:
            return self.base.values
        return find_values(self.graph, self.program, training=self.prices.training)

    @cached_property
    def grouped_seconds(self) -> Mapping[tuple[str, Layout], tuple[float, float]]:
        """Seconds of gathers that are made in groups, forward and backward, by what they give."""
        return grouped_seconds(self)

    def move_parts(self, value: Value) -> tuple[float, float]:
        """Seconds of the conversion that makes a value, forward and backward, if it is made in each
        micro-batch."""
        assert value.move is not None
        grouped = self.grouped_seconds.get((value.name, value.layout))
        return grouped or self.prices.move_parts(value.name, value.move)

    def place_of(self, value: Value) -> int:
        """The operator at which a conversion is made: the first that takes it, else the last of the graph."""
        return value.uses[0] if value.uses else len(self.graph.operators) - 1

    @cached_property
    def unread(self) -> frozenset[str]:
        """The constants that the largest rank's program doesn't read, and holds no more."""
        if self.base:
            return self.base.unread
        strategies = self.program.strategies
        read = {
            *self.graph.outputs,
            *(value for _, value in self.graph.writes),
            *(
                name
                for item in self.graph.operators
                for name in self.prices.reads(item, strategies[item.name])
            ),
        }
        constants = (item.name for item in self.graph.inputs if item.kind is InputKind.CONSTANT)
        return frozenset(constants) - read

    @cached_property
    def tape(self) -> Tape:
        """The calls of the largest rank; remedies make no difference."""
        return self.base.tape if self.base else record(self)

    @cached_property
    def peak(self) -> Peak:
        """The memory of a step on the largest rank."""
        return peak_memory(self)

    @cached_property
    def cost(self) -> StepCost:
        """The seconds of a step."""
        return step_cost(self)

    @property
    def seconds(self) -> float:
        """Predicted seconds of one micro-batch with its share of what is done once a step: of one training
        step if there are no micro-batches."""
        return self.cost.weighted(self.prices.step_weight)

    def at(self, prices: Prices) -> PricedProgram:
        """The program at other prices of the same graph: its values are the same, and so is its memory."""
        other = PricedProgram(prices, self.program)
        other.__dict__.update(values=self.values, tape=self.tape)
        return other

    @property
    def plain(self) -> PricedProgram:
        """The program without remedies: nothing is recomputed, no activation offloaded, no weight ahead."""
        return self.remedied(recompute=(), offload=(), ahead=())

    def gathered_together(self, cap: int | None, starts: Sequence[int] = ()) -> PricedProgram:
        """The program with weights that are gathered in groups, as far as `cap` bytes allow.

        None spans stages that begin at `starts`."""
        return gathered_together(self, cap, starts)

    def hosting(self, names: Sequence[str]) -> PricedProgram:
        """The program with these weights in the host's memory, and no remedies."""
        program = replace(self.plain.program, on_host=tuple(names))
        return PricedProgram(self.prices, program)

    def remedied(
        self,
        *,
        recompute: tuple[Segment, ...] | None = None,
        offload: tuple[OffloadedTensor, ...] | None = None,
        ahead: tuple[str, ...] | None = None,
    ) -> PricedProgram:
        """The program with other recomputed parts, other tensors offloaded, or other weights that come ahead
        from the host, where given."""
        wanted = {"recompute": recompute, "offload": offload, "ahead": ahead}
        changes: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        if all(value == getattr(self.program, name) for name, value in changes.items()):
            return self
        program = replace(self.program, **changes)
        return PricedProgram(self.prices, program, self.base or self)
