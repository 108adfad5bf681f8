"""Rows that a graph's structure picks and places, as two operators whose indices are constants.

    pick(x, index)                        x[index]                          index_select(x, 0, index)
    place(rows, index, length, "sum")     y[i] = sum of rows with index i   index_add, index_reduce of zeros

`place` takes amax, amin, mean and prod as well; a row that nothing is placed at is zero. Of rows along
another dim, [K, N, F], that dim comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Graph, Operator, Ref, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.trace.forms.simplify import without_dead_code
from autopar.trace.forms.sparse_products import NAMESPACE, PRODUCT

aten = torch.ops.aten
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")


def _pick(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


def _place(rows: Tensor, index: Tensor, length: int, reduce: str) -> Tensor:
    into = rows.new_zeros(length, *rows.shape[1:])
    if reduce == "sum":
        return into.index_add(0, index, rows)
    return into.index_reduce(0, index, rows, reduce, include_self=False)


_library.define("pick(Tensor x, Tensor index) -> Tensor")
_library.define("place(Tensor rows, Tensor index, int length, str reduce) -> Tensor")
_library.impl("pick", _pick, "CompositeImplicitAutograd")
_library.impl("place", _place, "CompositeImplicitAutograd")
PICK: Any = torch.ops.autopar_graphs.pick.default
PLACE: Any = torch.ops.autopar_graphs.place.default


def with_edge_operators(graph: Graph) -> Graph:
    """The graph with these operators where constants pick and place whole rows, if it adds any up."""
    return _EdgeOperators(graph).run()


class _EdgeOperators:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.specs = graph, dict(graph.specs)
        self.constants = {item.name for item in graph.inputs if item.value is not None}
        self.zeros = {
            name for item in graph.operators if facts_of(item.target).is_zero for name in item.results
        }

    def run(self) -> Graph:
        placed = {item.name: found for item in self.graph.operators if (found := self.placed(item))}
        if not placed and all(item.target is not PRODUCT for item in self.graph.operators):
            return self.graph
        operators = [
            each
            for item in self.graph.operators
            for each in placed.get(item.name) or self.picked(item) or [item]
        ]
        return without_dead_code(replace(self.graph, operators=tuple(operators), specs=self.specs))

    def picked(self, item: Operator) -> list[Operator] | None:
        """A pick of whole rows."""
        if item.target is not aten.index_select.default:
            return None
        x, dim, index = item.args
        if not self.specs[x.name].shape or not self.is_vector(index):
            return None
        return self.along(item, PICK, x, dim, lambda rows: (rows, index))

    def placed(self, item: Operator) -> list[Operator] | None:
        """A sum or another reduction of rows that are placed among zeros."""
        sums = item.target is aten.index_add.default and not item.kwargs
        if not sums and (
            item.target is not aten.index_reduce.default or item.kwargs.get("include_self", True)
        ):
            return None
        into, dim, index, rows, *reduce = item.args
        shape = self.specs[into.name].shape
        if into.name not in self.zeros or not self.is_vector(index) or not shape:
            return None
        length = shape[dim % len(shape)]
        return self.along(item, PLACE, rows, dim, lambda rows: (rows, index, length, *(reduce or ["sum"])))

    def is_vector(self, index: Ref) -> bool:
        return index.name in self.constants and len(self.specs[index.name].shape) == 1

    def along(
        self, item: Operator, target: Any, rows: Ref, dim: int, arguments: Callable[[Ref], tuple[Any, ...]]
    ) -> list[Operator]:
        """The operator on rows along `dim`, which is put in front for it."""
        result = item.results[0]
        assert result is not None
        if not dim % len(self.specs[result].shape):
            return [replace(item, target=target, args=arguments(rows), kwargs={})]
        front, made = f"{result}_front", f"{result}_rows"
        self.specs[front] = self.swapped(rows.name, dim)
        self.specs[made] = self.swapped(result, dim)

        def swap(name: str, source: str) -> Operator:
            args = (Ref(source), 0, dim)
            return replace(item, name=name, target=aten.transpose.int, args=args, kwargs={}, results=(name,))

        run = replace(item, name=made, target=target, args=arguments(Ref(front)), kwargs={}, results=(made,))
        last = replace(swap(result, made), name=item.name)
        return [swap(front, rows.name), run, last]

    def swapped(self, name: str, dim: int) -> TensorSpec:
        """A tensor's spec with dim `dim` and the first one swapped."""
        shape = list(self.specs[name].shape)
        shape[0], shape[dim] = shape[dim], shape[0]
        return replace(self.specs[name], shape=tuple(shape))
