"""Rows that a graph's structure picks and places, as two operators whose indices are constants.

    pick(x, index)                        x[index]                          index_select(x, 0, index)
    place(rows, index, length, "sum")     y[i] = sum of rows with index i   index_add, index_reduce of zeros

`place` takes amax, amin, mean and prod as well; a row that nothing is placed at is zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Graph, Operator
from autopar.core.operator_facts import facts_of
from autopar.trace.simplify import without_dead_code
from autopar.trace.sparse_products import NAMESPACE, PRODUCT

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
    constants = {item.name for item in graph.inputs if item.value is not None}
    zeros = {
        name for item in graph.operators if facts_of(item.target).is_zero for name in item.results if name
    }
    placed = {item.name: found for item in graph.operators if (found := _placed(item, constants, zeros))}
    if not placed and all(item.target is not PRODUCT for item in graph.operators):
        return graph
    operators = tuple(
        placed.get(item.name) or _picked(item, graph, constants) or item for item in graph.operators
    )
    return without_dead_code(replace(graph, operators=_with_lengths(operators, graph)))


def _picked(item: Operator, graph: Graph, constants: set[str]) -> Operator | None:
    """A pick of rows of dim 0."""
    if item.target is not aten.index_select.default:
        return None
    x, dim, index = item.args
    shape = graph.specs[x.name].shape
    if (
        not shape
        or dim % len(shape)
        or index.name not in constants
        or len(graph.specs[index.name].shape) != 1
    ):
        return None
    return replace(item, target=PICK, args=(x, index))


def _placed(item: Operator, constants: set[str], zeros: set[str]) -> Operator | None:
    """A sum or another reduction of rows that are placed among zeros, in dim 0; its length comes later."""
    sums = item.target is aten.index_add.default and not item.kwargs
    if not sums and (item.target is not aten.index_reduce.default or item.kwargs.get("include_self", True)):
        return None
    into, dim, index, rows, *reduce = item.args
    if dim != 0 or into.name not in zeros or index.name not in constants:
        return None
    return replace(item, target=PLACE, args=(rows, index, 0, *(reduce or ["sum"])), kwargs={})


def _with_lengths(operators: tuple[Operator, ...], graph: Graph) -> tuple[Operator, ...]:
    """Places as long as their results."""

    def told(item: Operator) -> Operator:
        rows, index, _, reduce = item.args
        result = item.results[0]
        assert result is not None
        return replace(item, args=(rows, index, graph.specs[result].shape[0], reduce))

    return tuple(told(item) if item.target is PLACE else item for item in operators)
