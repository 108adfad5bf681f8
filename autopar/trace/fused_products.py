"""Sums of neighbours' rows are products with a sparse matrix: no message of an edge is written down.

    x -> index_select(src) [-> mul(weight [E, 1])] -> index_add(zeros, dst)    product(dst, src, weight, x, n)

Where nothing else uses the messages. The weight of an edge is a number of the graph, 1 where there is none,
or what forward makes, and may learn. Entries lie in the order of rows, as a product wants them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.core.graph import Graph, GraphInput, InputKind, Operator, Ref, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.trace.simplify import without_dead_code
from autopar.trace.sparse_products import PRODUCT

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of rows of `x`: its operators, the rows that it takes and gives, and the tensor of weights."""

    add: Operator
    pick: Operator
    x: str
    source: str
    target: str
    weight: str | None


def with_products(graph: Graph) -> Graph:
    """The graph with such sums as products."""
    return _Fusion(graph).run()


class _Fusion:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {name: item for item in graph.operators for name in item.results if name}
        self.uses = graph.consumers()
        self.values = {item.name: item for item in graph.inputs if item.value is not None}
        self.inputs: dict[str, GraphInput] = {}  # that are new
        self.specs = dict(graph.specs)

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
        """What the operator sums, if that is rows which only it uses."""
        if item.target is not aten.index_add.default or item.kwargs or len(item.args) != 4:
            return None
        _, dim, index, messages = item.args
        if dim != 0 or index.name not in self.values or len(self.specs[messages.name].shape) != 2:
            return None
        maker, weight = self.only_maker(messages.name), None
        if maker is not None and maker.target is aten.mul.Tensor and len(maker.operands) == 2:
            weight, maker = self.weighted(maker)
        if maker is None or maker.target is not aten.index_select.default:
            return None
        x, along, source = maker.args
        if along % 2 or source.name not in self.values or not self.specs[x.name].dtype.is_floating_point:
            return None
        return _Sum(item, maker, x.name, source.name, index.name, weight)

    def only_maker(self, name: str) -> Operator | None:
        """Who makes a tensor, if it has one use."""
        single = len(self.uses[name]) == 1 and name not in self.graph.outputs
        return self.makers.get(name) if single else None

    def weighted(self, product: Operator) -> tuple[str | None, Operator | None]:
        """The weights [E, 1] that rows are multiplied by, and who picks the rows."""
        for weight, rows in (product.operands, product.operands[::-1]):
            shape, maker = self.specs[rows].shape, self.only_maker(rows)
            picks = maker is not None and maker.target is aten.index_select.default
            if picks and len(shape) == 2 and self.specs[weight].shape == (shape[0], 1):
                return weight, maker
        return None, None

    def product(self, found: _Sum) -> list[Operator]:
        """The operators that give the sum as a product, and add what it is added to."""
        target, source = self.value(found.target), self.value(found.source)
        order = torch.argsort(target, stable=True)
        rows = self.constant(f"{found.add.name}_rows", target[order])
        columns = self.constant(f"{found.add.name}_columns", source[order])
        before, values = self.weights(found, order)
        into, result = found.add.operands[0], found.add.results[0]
        assert result is not None
        is_zero = into in self.makers and facts_of(self.makers[into].target).is_zero
        length, spec = self.specs[into].shape[0], self.specs[result]
        name = result if is_zero else f"{result}_product"
        self.specs[name] = replace(spec, requires_grad=spec.requires_grad)
        args = (*map(Ref, (rows, columns, values, found.x)), length)
        made = replace(found.add, target=PRODUCT, args=args, kwargs={}, results=(name,))
        if is_zero:
            return [*before, made]
        title = f"{found.add.name}_sum"
        added = replace(
            found.add, name=title, target=aten.add.Tensor, args=(Ref(into), Ref(name)), results=(result,)
        )
        return [*before, made, added]

    def weights(self, found: _Sum, order: Tensor) -> tuple[list[Operator], str]:
        """The weights in the order of rows, and the operators that put them so."""
        name, spec = f"{found.add.name}_weights", self.specs[found.x]
        if found.weight is None:
            return [], self.constant(name, torch.ones(len(order), dtype=spec.dtype))
        given = self.values.get(found.weight)
        if given is not None and given.value is not None:
            exact = None if given.exact is None else given.exact.reshape(-1)[order]
            return [], self.constant(name, given.value.reshape(-1)[order], exact)
        learns = self.specs[found.weight]
        flat, picked = f"{name}_flat", f"{name}_picked"
        self.specs[flat] = self.specs[picked] = replace(learns, shape=(len(order),))
        index = self.constant(f"{name}_order", order)
        view = replace(
            found.add,
            name=flat,
            target=aten.reshape.default,
            args=(Ref(found.weight), [len(order)]),
            results=(flat,),
        )
        pick = replace(
            view,
            name=picked,
            target=aten.index_select.default,
            args=(Ref(flat), 0, Ref(index)),
            results=(picked,),
        )
        return [view, pick], picked

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
