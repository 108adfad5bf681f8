"""The calls that an operator's rule writes for the rank that is priced: the one with the most to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

import autopar.runtime.collectives.placement_moves
import autopar.runtime.collectives.random  # noqa: F401  (registers the operators that rules write)
from autopar.core.graph import Operator, TensorSpec
from autopar.core.strategy import Strategy
from autopar.cost.operators.fused_groups import OperatorTraffic
from autopar.errors import AutoparError
from autopar.rewrite.emit import GraphEmitter
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Instance, Site, rule_of


@dataclass(frozen=True, slots=True)
class LoweredOperator:
    """What a rule wrote, with the nodes of operands and results; `member` is the operator's part of a fused
    group."""

    operation: Operator
    emitter: GraphEmitter
    values: Sequence[fx.Node]
    results: Sequence[Any]
    member: OperatorTraffic | None = None

    @property
    def operands(self) -> tuple[TensorSpec, ...]:
        return tuple(map(self.emitter.described, self.values))

    @property
    def given(self) -> tuple[TensorSpec | None, ...]:
        """Specs of results; None for those that are no tensors."""
        described = self.emitter.described
        return tuple(described(node) if isinstance(node, fx.Node) else None for node in self.results)


def lower(
    operation: Operator,
    strategy: Strategy,
    dims: Dims,
    *,
    training: bool,
    member: OperatorTraffic | None = None,
) -> LoweredOperator:
    """Write the calls of an operator's rule for the rank that is priced."""
    emitter, place = GraphEmitter(runs=False), priced_rank(operation, strategy, dims)
    values = []
    shapes = local_shapes(operation, strategy, dims, place)
    for index, (name, shape) in enumerate(zip(operation.operands, shapes, strict=True)):
        spec = dims.graph.specs[name]
        local = TensorSpec(shape, spec.dtype, spec.requires_grad and training)
        values.append(emitter.placeholder(f"operand_{index}", local))
    site = _site(operation, strategy, dims, place, emitter, values)
    try:
        return LoweredOperator(operation, emitter, values, list(rule_of(operation).lower(site)), member)
    except (AutoparError, RuntimeError, TypeError) as error:
        error.add_note(f"while pricing {operation.name} ({operation.target}) as {list(map(str, strategy))}")
        raise


def local_shapes(
    operation: Operator, strategy: Strategy, dims: Dims, place: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Shapes of a rank's operands."""
    return tuple(
        dims.local_shape(name, tuple(option.operands[index] for option in strategy), place)
        for index, name in enumerate(operation.operands)
    )


def priced_rank(operation: Operator, strategy: Strategy, dims: Dims) -> tuple[int, ...]:
    """The coordinate of the rank that is priced: the one that its rule calls the fullest, else the one whose
    operands and results have the most elements."""
    first = (0,) * len(dims.mesh.shape)
    if rule_of(operation).is_uneven(Instance(operation, dims.graph.specs)):
        emitter = GraphEmitter(runs=False)
        return rule_of(operation).fullest(_site(operation, strategy, dims, first, emitter, ()))
    taken = [(name, tuple(o.operands[i] for o in strategy)) for i, name in enumerate(operation.operands)]
    made = [(name, tuple(o.results[i] for o in strategy)) for i, name in enumerate(operation.results) if name]
    ends = [*taken, *made]
    places = dict.fromkeys(dims.largest(*end) for end in ends)

    def elements(place: tuple[int, ...]) -> int:
        return sum(math.prod(dims.local_shape(*end, place)) for end in ends)

    return max(places, key=elements) if len(places) > 1 else next(iter(places), first)


def _site(
    operation: Operator,
    strategy: Strategy,
    dims: Dims,
    coordinate: tuple[int, ...],
    emitter: GraphEmitter,
    values: Sequence[fx.Node],
) -> Site:
    return Site(
        operation,
        dims=dims,
        strategy=strategy,
        coordinate=coordinate,
        emitter=emitter,
        values=values,
        exact_random=False,
    )
