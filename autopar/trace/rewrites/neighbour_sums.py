"""Sums of neighbours' rows are products with a sparse matrix: no message of an edge is written down.

    x -> pick(src) [-> mul(weight [E, 1])] -> place(dst, n, "sum")    product(dst, src, weight, x, n)

Where nothing else uses the messages, whatever dims rows have: of x [K, N, F] with vertices in dim 1 the
product takes [N, K F]. The weight of an edge is a number of the graph, 1 where there is none,
or what forward makes, and may learn. Entries lie in the order of rows, as a product wants them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Ref
from autopar.trace.forms.sparse_products import PRODUCT
from autopar.trace.rewrites.constants import RAISED, Constants
from autopar.trace.rewrites.edge_operators import PICK
from autopar.trace.rewrites.row_placements import RowPick, RowPlacement
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten


class NeighbourSums:
    """Writes sums of rows that are `picks` as products."""

    def __init__(self, editor: GraphEditor, constants: Constants, picks: Mapping[str, RowPick]) -> None:
        self.editor, self.constants, self.picks = editor, constants, picks
        self.uses = editor.graph.consumers()

    def write(self, placed: RowPlacement) -> str | None:
        """Write the sum of rows as a product; None if others use the rows, or these aren't picked."""
        specs, dim = self.editor.specs, placed.dim
        messages = specs[placed.source]
        weight, picked = self.weighted(placed)
        if picked is None or picked.dim != dim or not messages.dtype.is_floating_point:
            return None
        wanted = list(specs[picked.source].shape)
        wanted[dim : dim + 1] = [len(placed.index)]
        if messages.shape != tuple(wanted) or 0 in wanted:
            return None
        return self.product(placed, picked, weight)

    def weighted(self, placed: RowPlacement) -> tuple[str | None, RowPick | None]:
        """The weights, one for each row, that picked rows are multiplied by, if any, and the pick."""
        maker = self.editor.makers.get(placed.source)
        if maker is None or not self.is_used_once(placed.source):
            return None, None
        if placed.source in self.picks:
            return None, self.picks[placed.source]
        if maker.target is aten.mul.Tensor and len(maker.operands) == 2:
            for weight, rows in (maker.operands, maker.operands[::-1]):
                if (
                    rows in self.picks
                    and self.is_used_once(rows)
                    and self.is_column(weight, rows, placed.dim)
                ):
                    return weight, self.picks[rows]
        return None, None

    def is_used_once(self, name: str) -> bool:
        return len(self.uses[name]) == 1 and name not in self.editor.graph.outputs

    def is_column(self, weight: str, rows: str, dim: int) -> bool:
        """Whether a tensor has one number for each row along `dim`."""
        given, shape = self.editor.specs[weight].shape, self.editor.specs[rows].shape
        wanted = [size if here == dim else 1 for here, size in enumerate(shape)]
        return [1] * (len(shape) - len(given)) + [*given] == wanted

    def product(self, placed: RowPlacement, picked: RowPick, weight: str | None) -> str:
        """Write the sum as a product, on matrices of rows."""
        editor, dim, order = self.editor, placed.dim, torch.argsort(placed.index, stable=True)
        name, shape = editor.item.name, editor.specs[editor.result].shape
        rows = editor.constant(f"{name}_rows", placed.index[order])
        columns = editor.constant(f"{name}_columns", picked.index[order])
        values, x = self.weights(weight, order, picked), picked.source
        length, width = shape[dim], math.prod(shape) // shape[dim]
        if dim:
            x = self.like(x, aten.transpose.int, 0, dim, shape=_swapped(editor.specs[x].shape, dim))
        if len(shape) != 2:
            flat = editor.specs[x].shape[0], width
            x = self.like(x, aten.reshape.default, [*flat], shape=flat)
        args = (*map(Ref, (rows, columns, values, x)), length)
        spec = replace(editor.specs[editor.result], shape=(length, width))
        found = editor.emit(PRODUCT, *args, spec=spec)
        if len(shape) != 2:
            front = _swapped(shape, dim)
            found = self.like(found, aten.reshape.default, [*front], shape=front)
        return self.like(found, aten.transpose.int, 0, dim, shape=shape) if dim else found

    def weights(self, weight: str | None, order: Tensor, picked: RowPick) -> str:
        """The weights in the order of rows."""
        name = f"{self.editor.item.name}_weights"
        if weight is None:
            ones = torch.ones(len(order), dtype=self.editor.specs[picked.source].dtype)
            return self.editor.constant(name, ones)
        if weight in self.constants:
            value = self.constants.value(weight).reshape(-1)[order]
            exact = self.constants.exact_value(weight).reshape(-1)[order] if value.dtype in RAISED else None
            return self.editor.constant(name, value, exact)
        flat = self.like(weight, aten.reshape.default, [len(order)], shape=(len(order),))
        index = Ref(self.editor.constant(f"{name}_order", order))
        return self.like(flat, PICK, index, shape=(len(order),))

    def like(self, name: str, target: Any, *args: Any, shape: tuple[int, ...]) -> str:
        """Write an operator on a tensor that gives one like it of another shape."""
        spec = replace(self.editor.specs[name], shape=shape)
        return self.editor.emit(target, Ref(name), *args, spec=spec)


def _swapped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """A shape with a dim in the place of the first."""
    swapped = list(shape)
    swapped[0], swapped[dim] = shape[dim], shape[0]
    return tuple(swapped)
