"""Sums of neighbours' rows are products with a sparse matrix: no message of an edge is written down.

    x -> index_select(src) [-> mul(weight [E, 1])] -> index_add(zeros, dst)    product(dst, src, weight, x, n)

Where nothing else uses the messages, whatever dims rows have: of x [K, N, F] with vertices in dim 1 the
product takes [N, K F]. The weight of an edge is a number of the graph, 1 where there is none,
or what forward makes, and may learn. Entries lie in the order of rows, as a product wants them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Graph, GraphInput, InputKind, Operator, Ref, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.torch_seams.schemas import schema_of
from autopar.trace.forms.simplify import without_dead_code
from autopar.trace.forms.sparse_products import PRODUCT

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of rows of `x` along `dim`: the rows that it takes and gives, and the tensor of weights."""

    add: Operator
    x: str
    source: str
    target: str
    weight: str | None
    dim: int


def with_products(graph: Graph) -> Graph:
    """The graph with such sums as products."""
    return _Fusion(graph).run()


def _swapped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """A shape with a dim in the place of the first."""
    swapped = list(shape)
    swapped[0], swapped[dim] = shape[dim], shape[0]
    return tuple(swapped)


class _Fusion:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {name: item for item in graph.operators for name in item.results if name}
        self.uses = graph.consumers()
        self.values = {item.name: item for item in graph.inputs if item.value is not None}
        self.inputs: dict[str, GraphInput] = {}  # that are new
        self.specs = dict(graph.specs)
        self.written: list[Operator] = []  # of one product

    def run(self) -> Graph:
        operators: list[Operator] = []
        for item in self.graph.operators:
            found = self.sum_of(item)
            operators += [item] if found is None else self.product(found)
        if not self.inputs:
            return self.graph
        inputs = (*self.graph.inputs, *self.inputs.values())
        made = replace(self.graph, operators=tuple(operators), inputs=inputs, specs=self.specs)
        return without_dead_code(made)

    def sum_of(self, item: Operator) -> _Sum | None:
        """The sum of picked rows that an operator computes, None if other operators use the rows."""
        if item.target is not aten.index_add.default or item.kwargs or len(item.args) != 4:
            return None
        into, dim, index, messages = item.args
        shape = self.specs[messages.name].shape
        dim = dim % max(1, len(shape))
        if index.name not in self.values or len(shape) != len(self.specs[into.name].shape) or not shape:
            return None
        maker, weight = self.only_maker(messages.name), None
        if maker is not None and maker.target is aten.mul.Tensor and len(maker.operands) == 2:
            weight, maker = self.weighted(maker, dim)
        if maker is None or maker.target is not aten.index_select.default:
            return None
        x, along, source = maker.args
        picked = self.specs[x.name]
        if len(picked.shape) != len(shape) or along % len(shape) != dim or source.name not in self.values:
            return None
        if self.specs[messages.name].shape != (*picked.shape[:dim], shape[dim], *picked.shape[dim + 1 :]):
            return None
        if not picked.dtype.is_floating_point or 0 in shape:
            return None
        return _Sum(item, x.name, source.name, index.name, weight, dim)

    def only_maker(self, name: str) -> Operator | None:
        """Who makes a tensor, if it has one use."""
        single = len(self.uses[name]) == 1 and name not in self.graph.outputs
        return self.makers.get(name) if single else None

    def weighted(self, product: Operator, dim: int) -> tuple[str | None, Operator | None]:
        """The weights, one for each row along `dim`, that rows are multiplied by, and who picks the rows."""
        for weight, rows in (product.operands, product.operands[::-1]):
            shape, maker = self.specs[rows].shape, self.only_maker(rows)
            given = self.specs[weight].shape
            wanted = [size if here == dim else 1 for here, size in enumerate(shape)]
            picks = maker is not None and maker.target is aten.index_select.default
            if picks and [1] * (len(shape) - len(given)) + [*given] == wanted:
                return weight, maker
        return None, None

    def product(self, found: _Sum) -> list[Operator]:
        """The operators that give the sum as a product, and add what it is added to."""
        target, source = self.value(found.target), self.value(found.source)
        order = torch.argsort(target, stable=True)
        rows = self.constant(f"{found.add.name}_rows", target[order])
        columns = self.constant(f"{found.add.name}_columns", source[order])
        self.written = []
        values = self.weights(found, order)
        into, result = found.add.operands[0], found.add.results[0]
        assert result is not None
        shape = self.specs[result].shape
        x = self.flat(found, self.specs[found.x].shape)
        args = (*map(Ref, (rows, columns, values, x)), shape[found.dim])
        width = math.prod(shape) // shape[found.dim]
        name = self.emit(found.add, result, PRODUCT, *args, shape=(shape[found.dim], width))
        name = self.opened(found, name, result, shape)
        if into not in self.makers or not facts_of(self.makers[into].target).is_zero:
            self.emit(found.add, result, aten.add.Tensor, Ref(into), Ref(name), shape=shape)
        *others, last = self.written
        return [*others, replace(last, name=found.add.name, results=(result,))]

    def flat(self, found: _Sum, shape: tuple[int, ...]) -> str:
        """The rows that a sum takes as those of a matrix."""
        x, front = found.x, _swapped(shape, found.dim)
        if found.dim:
            x = self.emit(found.add, x, aten.transpose.int, Ref(x), 0, found.dim, shape=front)
        if len(shape) == 2:
            return x
        flat = front[0], math.prod(front[1:])
        return self.emit(found.add, x, aten.reshape.default, Ref(x), [*flat], shape=flat)

    def opened(self, found: _Sum, name: str, result: str, shape: tuple[int, ...]) -> str:
        """The rows of a matrix with the dims that they had."""
        front = _swapped(shape, found.dim)
        if len(shape) != 2:
            name = self.emit(found.add, result, aten.reshape.default, Ref(name), [*front], shape=front)
        if found.dim:
            name = self.emit(found.add, result, aten.transpose.int, Ref(name), 0, found.dim, shape=shape)
        return name

    def emit(self, add: Operator, like: str, target: Any, *args: Any, shape: tuple[int, ...]) -> str:
        """Write an operator as a part of a sum, and return the name of its result."""
        name = f"{add.name}_{schema_of(target).name.partition('::')[2]}_{len(self.written)}"
        self.specs[name] = replace(self.specs[like], shape=shape)
        self.written.append(replace(add, name=name, target=target, args=args, kwargs={}, results=(name,)))
        return name

    def weights(self, found: _Sum, order: Tensor) -> str:
        """The weights in the order of rows."""
        name, spec = f"{found.add.name}_weights", self.specs[found.x]
        if found.weight is None:
            return self.constant(name, torch.ones(len(order), dtype=spec.dtype))
        given = self.values.get(found.weight)
        if given is not None and given.value is not None:
            exact = None if given.exact is None else given.exact.reshape(-1)[order]
            return self.constant(name, given.value.reshape(-1)[order], exact)
        args = Ref(found.weight), [len(order)]
        flat = self.emit(found.add, found.weight, aten.reshape.default, *args, shape=(len(order),))
        index = Ref(self.constant(f"{name}_order", order))
        return self.emit(found.add, flat, aten.index_select.default, Ref(flat), 0, index, shape=(len(order),))

    def value(self, name: str) -> Tensor:
        value = self.values[name].value
        assert value is not None
        return value

    def constant(self, name: str, value: Tensor, exact: Tensor | None = None) -> str:
        spec = TensorSpec(tuple(value.shape), value.dtype)
        self.specs[name] = spec
        made = GraphInput(name, InputKind.CONSTANT, f"folded.{name}", spec, value=value, exact=exact)
        self.inputs[name] = made
        return name
