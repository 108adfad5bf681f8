"""Rows that constants pick and place, written as picks, and as sums and reductions of rows among zeros.

    index_copy(x, i, rows)                 where(placed, place(rows, i), x)     no row placed twice
    index_put(x, [i], rows), scatter,
    slice_scatter(x, rows, a, b)           the same
    index_add(x, i, rows)                  x + place(rows, i, "sum")
    index_reduce(x, i, rows, "prod")       x * masked_fill(place(rows, i, "prod"), not placed, 1)
    segment_reduce(rows, "mean", lengths)  place(rows, i, "mean"), i = 0 0 0 1 2 2 ...

`placed` is a constant: which rows the indices name. What takes them among zeros has rules by which vertices
and edges are split. Of rows along another dim, [K, N, F], that dim comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Ref, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.trace.rewrites.constants import Constants
from autopar.trace.rewrites.edge_operators import PICK, PLACE
from autopar.trace.rewrites.neighbour_sums import NeighbourSums
from autopar.trace.rewrites.row_placements import RowPick, RowPlacement
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten
_EMPTY = {"sum": 0.0, "prod": 1.0, "mean": math.nan, "amax": -math.inf, "amin": math.inf}


class RowWriter:
    """Writes operators that pick and place rows; results of `picks` are rows that it picks."""

    def __init__(self, editor: GraphEditor, constants: Constants, picks: Mapping[str, RowPick]) -> None:
        self.editor, self.constants = editor, constants
        self.sums = NeighbourSums(editor, constants, picks)

    def pick(self, picked: RowPick) -> None:
        """Write a pick of rows."""
        rows = Ref(self.front(picked.source, picked.dim)), Ref(self.index(picked))
        self.back(picked.dim, PICK, *rows)
        self.editor.end()

    def index(self, rows: RowPick | RowPlacement) -> str:
        """The constant that says which rows, itself or a new one."""
        says = rows.name in self.constants and self.constants.value(rows.name) is rows.index
        return rows.name if says else self.editor.constant(f"{rows.name}_rows", rows.index)

    def place(self, placed: RowPlacement) -> None:
        """Write operators that do what one does which places rows."""
        self.placed, into = placed, placed.into
        spec = self.editor.specs[self.editor.result]
        self.count = torch.bincount(placed.index, minlength=spec.shape[placed.dim])
        if into is not None and not len(placed.index):
            self.editor.emit(aten.alias.default, Ref(into))
        elif into is None:
            self.from_nothing()
        elif into in self.constants.makers and facts_of(self.constants.makers[into].target).is_zero:
            self.share(self.among_zeros())
        else:
            self.into_rows(into)
        self.editor.end()

    # -- the forms ------------------------------------------------------------------------------------

    def share(self, rows: str) -> None:
        """Give each row its share of the mean of itself, a zero, and what is placed on it."""
        if self.placed.reduce == "mean" and self.placed.includes:
            share = self.column(self.shares * self.count, "share")
            self.editor.emit(aten.mul.Tensor, Ref(rows), Ref(share))

    def from_nothing(self) -> None:
        """Rows placed where nothing was, each with an initial value, if there is one."""
        placed, rows, emit, start = self.placed, self.among_zeros(), self.editor.emit, self.placed.initial
        if placed.reduce == "sum":
            if start:
                emit(aten.add.Scalar, Ref(rows), start)
            return
        if start is not None:
            rows = self.started(rows, start)
        empty = _EMPTY[placed.reduce] if start is None else start
        if bool((self.count == 0).any()) and not (empty == 0.0 and placed.reduce != "prod"):
            emit(aten.masked_fill.Scalar, Ref(rows), Ref(self.mask(self.count == 0, "empty")), empty)

    def started(self, rows: str, start: float) -> str:
        """Reduced rows, each with an initial value."""
        emit = self.editor.emit
        match self.placed.reduce:
            case "prod":
                return rows if start == 1 else emit(aten.mul.Scalar, Ref(rows), start)
            case "mean":
                share = self.column(start / self.count.double().clamp(min=1), "start")
                return rows if not start else emit(aten.add.Tensor, Ref(rows), Ref(share))
            case reduce:
                ends = (start, None) if reduce == "amax" else (None, start)
                return emit(aten.clamp.default, Ref(rows), *ends)

    def into_rows(self, into: str) -> None:
        """Rows placed among others."""
        placed, emit, empty = self.placed, self.editor.emit, bool((self.count == 0).any())
        if placed.reduce == "mean" and placed.includes:
            self.placed = replace(placed, reduce="sum")
        rows = self.among_zeros()
        if placed.reduce == "prod" and placed.includes:
            if empty:
                mask = Ref(self.mask(self.count == 0, "empty"))
                rows = emit(aten.masked_fill.Scalar, Ref(rows), mask, 1.0)
            emit(aten.mul.Tensor, Ref(into), Ref(rows))
        elif placed.reduce in ("sum", "mean") and placed.includes:
            rows = emit(aten.add.Tensor, Ref(into), Ref(rows))
            if placed.reduce == "mean":
                share = self.column(self.shares, "share")
                emit(aten.mul.Tensor, Ref(rows), Ref(share))
        elif empty:
            emit(aten.where.self, Ref(self.mask(self.count > 0, "placed")), Ref(rows), Ref(into))

    def among_zeros(self) -> str:
        """Write the rows, reduced among zeros."""
        placed = replace(self.placed, source=self.source())
        adds = placed.reduce in ("sum", "copy")
        if adds and (product := self.sums.write(placed)) is not None:
            return product
        rows = Ref(self.front(placed.source, placed.dim)), Ref(self.index(placed))
        return self.back(placed.dim, PLACE, *rows, len(self.count), "sum" if adds else placed.reduce)

    @property
    def shares(self) -> Tensor:
        """Each row's share of the mean of itself and the rows that are placed on it."""
        return 1 / (self.count.double() + 1)

    # -- constants and operators ------------------------------------------------------------------------

    def source(self) -> str:
        """The rows that are placed, as many as the index says."""
        placed, specs = self.placed, self.editor.specs
        shape = list(specs[self.editor.result].shape)
        shape[placed.dim] = len(placed.index)
        spec = replace(specs[placed.source], shape=tuple(shape))
        if spec == specs[placed.source]:
            return placed.source
        return self.editor.emit(aten.expand.default, Ref(placed.source), shape, spec=spec, word="values")

    def mask(self, rows: Tensor, name: str) -> str:
        """A constant of flags, one for each row."""
        return self.editor.constant(f"{self.editor.item.name}_{name}", self.spread(rows))

    def column(self, rows: Tensor, name: str) -> str:
        """A constant of numbers, one for each row, which are rounded to the rows' dtype."""
        rows, dtype = self.spread(rows.double()), self.editor.specs[self.placed.source].dtype
        return self.editor.constant(f"{self.editor.item.name}_{name}", rows.to(dtype), rows)

    def spread(self, rows: Tensor) -> Tensor:
        """One element for each row, as it is broadcast to all of them."""
        shape = [1] * len(self.editor.specs[self.editor.result].shape)
        shape[self.placed.dim] = len(rows)
        return rows.view(shape)

    def front(self, name: str, dim: int) -> str:
        """A tensor with `dim` as the first."""
        if not dim:
            return name
        spec = _swapped(self.editor.specs[name], dim)
        return self.editor.emit(aten.transpose.int, Ref(name), 0, dim, spec=spec, word="front")

    def back(self, dim: int, target: Any, *args: Any) -> str:
        """Write an operator on rows, and put what it gives back where `dim` was."""
        spec = self.editor.specs[self.editor.result]
        made = self.editor.emit(target, *args, spec=_swapped(spec, dim))
        return self.editor.emit(aten.transpose.int, Ref(made), 0, dim) if dim else made


def _swapped(spec: TensorSpec, dim: int) -> TensorSpec:
    """A tensor's spec with `dim` and the first one swapped."""
    shape = list(spec.shape)
    shape[0], shape[dim] = shape[dim], shape[0]
    return replace(spec, shape=tuple(shape))
