"""Which rows an operator places where, if constants say so: many forms, read as one.

scatter_add(x, 0, i.view(-1, 1).expand(E, F), rows)     RowPlacement(0, i, rows, "sum", x, includes=True)
segment_reduce(rows, "mean", lengths=[3, 1, 2])         RowPlacement(0, 0 0 0 1 2 2, rows, "mean", length=3)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Operator, Ref, TensorSpec, may_learn
from autopar.trace.rewrites.placed_rows import RowPlacement

aten = torch.ops.aten
_SLICE: tuple[Any, ...] = (0, None, None, 1)  # dim, start, stop and step, if not said


class PlacementReader:
    """Reads operators of a graph with `specs`, of which what is `fixed` follows from constants, with a value;
    `rows` names the rows along a dim that an index of whole rows says."""

    def __init__(
        self,
        specs: dict[str, TensorSpec],
        fixed: Collection[str],
        value: Callable[[str], Tensor],
        rows: Callable[[str, int], str | None],
    ) -> None:
        self._specs, self._fixed, self._value, self._rows = specs, fixed, value, rows

    def read(self, item: Operator) -> tuple[list[Operator], RowPlacement | None]:
        """Read the row placement that an operator does, if constants say which, and operators that make its
        rows."""
        match item.target:
            case aten.scatter_add.default:
                return [], self._scattered(item, "sum", includes=True)
            case aten.scatter.src:
                return [], self._scattered(item, "copy", includes=False)
            case aten.scatter_reduce.two:
                includes = bool(item.kwargs.get("include_self", True))
                return [], self._scattered(item, str(item.args[4]), includes=includes)
            case aten.index_add.default | aten.index_copy.default | aten.index_reduce.default:
                return [], self._indexed(item)
            case aten.slice_scatter.default:
                return [], self._sliced(item)
            case aten.index_put.default:
                return self._put(item)
            case aten.segment_reduce.default:
                return [], self._segments(item)
            case _:
                return [], None

    def _scattered(self, item: Operator, reduce: str, *, includes: bool) -> RowPlacement | None:
        """Read a scatter by an index as large as what it places, if it names whole rows."""
        itself, dim, index, source = item.args[:4]
        shape, wanted = self._specs[source.name].shape, self._specs[itself.name].shape
        dim = dim % len(shape) if shape else 0
        if not shape or index.name not in self._fixed or self._specs[index.name].shape != shape:
            return None
        if (*shape[:dim], *shape[dim + 1 :]) != (*wanted[:dim], *wanted[dim + 1 :]):
            return None
        rows = self._rows(index.name, dim)
        if rows is None:
            return None
        return RowPlacement(dim, self._value(rows), source.name, reduce, itself.name, includes=includes)

    def _indexed(self, item: Operator) -> RowPlacement | None:
        """Read an operator whose index has one element for each row."""
        itself, dim, index, source, *reduce = item.args
        shape = self._specs[source.name].shape
        if not shape or item.kwargs.get("alpha", 1) != 1 or index.name not in self._fixed:
            return None
        if len(shape) != len(self._specs[itself.name].shape) or len(self._specs[index.name].shape) != 1:
            return None
        how = "copy" if item.target is aten.index_copy.default else "sum"
        includes = bool(item.kwargs.get("include_self", True)) and how == "sum"
        rows = self._value(index.name)
        return RowPlacement(
            dim % len(shape), rows, source.name, reduce[0] if reduce else how, itself.name, includes=includes
        )

    def _sliced(self, item: Operator) -> RowPlacement | None:
        """Read a slice of dim 0 that is written."""
        itself, source, *rest = item.args
        dim, start, stop, step = (*rest, *_SLICE[len(rest) :])
        shape = self._specs[itself.name].shape
        if dim % len(shape) or any(isinstance(each, Ref) for each in (start, stop, step)):
            return None
        rows = torch.arange(shape[0])[slice(start, stop, step)]
        return RowPlacement(0, rows, source.name, "copy", itself.name)

    def _put(self, item: Operator) -> tuple[list[Operator], RowPlacement | None]:
        """Read x[:, rows] = values, which may have to be expanded."""
        itself, indices, source, *accumulate = item.args
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1 or given[0][1].name not in self._fixed:
            return [], None
        dim, index = given[0]
        spec, shape = self._specs[index.name], list(self._specs[itself.name].shape)
        if len(spec.shape) != 1 or may_learn(spec.dtype) or spec.dtype is torch.bool:
            return [], None
        rows, length = self._value(index.name), shape[dim]
        rows = rows + length * (rows < 0)
        shape[dim] = len(rows)
        before: list[Operator] = []
        name = source.name
        if self._specs[name].shape != tuple(shape):
            name = f"{item.name}_values"
            self._specs[name] = replace(self._specs[source.name], shape=tuple(shape))
            args = (source, [*shape])
            before = [
                replace(item, name=name, target=aten.expand.default, args=args, kwargs={}, results=(name,))
            ]
        adds = bool(accumulate and accumulate[0])
        placed = RowPlacement(dim, rows, name, "sum" if adds else "copy", itself.name, includes=adds)
        return before, placed

    def _segments(self, item: Operator) -> RowPlacement | None:
        """Read runs of rows, one after the other, whose lengths or bounds are constants."""
        (source, reduce), said = item.args, item.kwargs
        ends = said.get("lengths") or said.get("offsets")
        learns = self._specs[source.name].requires_grad
        if reduce in ("max", "min") and learns:
            return None  # torch gives each of several largest rows the whole of a negative gradient
        if ends is None or ends.name not in self._fixed or len(self._specs[ends.name].shape) != 1:
            return None
        lengths = self._value(ends.name)
        lengths = lengths if said.get("lengths") else lengths.diff()
        initial, count = said.get("initial"), self._specs[source.name].shape[0]
        if said.get("axis") or bool((lengths < 0).any()) or int(lengths.sum()) != count:
            return None
        index = torch.arange(len(lengths)).repeat_interleave(lengths)
        reduce = {"max": "amax", "min": "amin"}.get(reduce, reduce)
        return RowPlacement(0, index, source.name, reduce, length=len(lengths), initial=initial)
