"""Which rows an operator picks or places, if constants say so: many forms, read as one.

    x[:, i]                                               RowPick(1, i, x)
    scatter_add(x, 0, i.view(-1, 1).expand(E, F), rows)   RowPlacement(0, i, rows, "sum", x, includes=True)
    segment_reduce(rows, "mean", lengths=[3, 1, 2])       RowPlacement(0, 0 0 0 1 2 2, rows, "mean", length=3)

Maxima that count what is there, too, and copies to one row twice are none of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Operator, Ref, TensorSpec, may_learn
from autopar.core.operator_facts import facts_of
from autopar.trace.rewrites.constants import Constants, out_of_range

aten = torch.ops.aten
_SLICE: tuple[Any, ...] = (0, None, None, 1)  # dim, start, stop and step, if not said
_OF_INTEGERS = (aten.index_add.default, aten.index_reduce.default, aten.scatter_reduce.two)  # among zeros


@dataclass(frozen=True, slots=True)
class RowPick:
    """The rows `index` of `source` along `dim`, which the constant called `name` says."""

    dim: int
    index: Tensor
    name: str
    source: str


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """Rows of `source` along `dim` that go to the rows `index` of `into`, or of nothing but a `length`; the
    constant called `name` says which.

    `reduce` is "copy", or how rows that meet are reduced, with what is there if it `includes` that.
    """

    dim: int
    index: Tensor
    name: str
    source: str
    reduce: str
    into: str | None = None
    length: int = 0
    includes: bool = False
    initial: float | None = None


class RowReader:
    """Reads operators of a graph with `specs`, of which some tensors are `constants`."""

    def __init__(self, specs: Mapping[str, TensorSpec], constants: Constants) -> None:
        self._specs, self._constants = specs, constants

    def picked(self, item: Operator) -> RowPick | None:
        """Read the rows of one dim that an operator picks; raises TraceError for such that aren't there."""
        found = None
        if item.target is aten.index_select.default:
            source, dim, index = item.args
            if self._shape(source) and index.name in self._constants and len(self._shape(index)) == 1:
                found = dim % len(self._shape(source)), self._constants.value(index.name), index.name
        elif item.target is aten.index.Tensor:
            found = self._indexed_dim(item)
        if found is None:
            return None
        picked = RowPick(*found, item.args[0].name)
        self.check(item, picked.index, self._specs[picked.source].shape[picked.dim])
        return picked

    def placed(self, item: Operator) -> RowPlacement | None:
        """Read the rows that an operator places, unless it has to stay as it is; raises TraceError for such
        that aren't there."""
        placed = self._read(item)
        if placed is None:
            return None
        self.check(item, placed.index, self.length(placed))
        is_alone = placed.into is None or self.is_zero(placed.into)
        meets = placed.includes and placed.into is not None and placed.reduce != "sum"
        if not self._specs[placed.source].dtype.is_floating_point:
            return placed if item.target in _OF_INTEGERS and is_alone and not meets else None
        if meets and (placed.reduce in ("amax", "amin") or placed.reduce == "prod" and is_alone):
            return None
        twice = placed.reduce == "copy" and len(placed.index.unique()) < len(placed.index)
        return None if twice else placed

    def check(self, item: Operator, rows: Tensor, length: int) -> None:
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < length:
            raise out_of_range(item, f"rows {int(rows.min())} to {int(rows.max())} of {length}")

    def length(self, placed: RowPlacement) -> int:
        """How many rows there are where these go to."""
        return self._specs[placed.into].shape[placed.dim] if placed.into else placed.length

    def is_zero(self, name: str) -> bool:
        maker = self._constants.makers.get(name)
        return maker is not None and facts_of(maker.target).is_zero

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        return self._specs[ref.name].shape

    def _read(self, item: Operator) -> RowPlacement | None:
        match item.target:
            case aten.scatter_add.default:
                return self.scattered(item, "sum", includes=True)
            case aten.scatter.src:
                return self.scattered(item, "copy", includes=False)
            case aten.scatter_reduce.two:
                includes = bool(item.kwargs.get("include_self", True))
                return self.scattered(item, str(item.args[4]), includes=includes)
            case aten.index_add.default | aten.index_copy.default | aten.index_reduce.default:
                return self._indexed(item)
            case aten.slice_scatter.default:
                return self._sliced(item)
            case aten.index_put.default:
                return self._put(item)
            case aten.segment_reduce.default:
                return self._segments(item)
            case _:
                return None

    def scattered(self, item: Operator, reduce: str, *, includes: bool) -> RowPlacement | None:
        """Read a scatter by an index as large as what it places, if it names whole rows."""
        itself, dim, index, source = item.args[:4]
        shape, wanted = self._specs[source.name].shape, self._specs[itself.name].shape
        dim = dim % len(shape) if shape else 0
        if not shape or index.name not in self._constants or self._specs[index.name].shape != shape:
            return None
        if (*shape[:dim], *shape[dim + 1 :]) != (*wanted[:dim], *wanted[dim + 1 :]):
            return None
        rows = self._rows(self._constants.value(index.name), dim)
        if rows is None:
            return None
        return RowPlacement(dim, rows, index.name, source.name, reduce, itself.name, includes=includes)

    def _indexed(self, item: Operator) -> RowPlacement | None:
        """Read an operator whose index has one element for each row."""
        itself, dim, index, source, *reduce = item.args
        shape = self._specs[source.name].shape
        if not shape or item.kwargs.get("alpha", 1) != 1 or index.name not in self._constants:
            return None
        if len(shape) != len(self._specs[itself.name].shape) or len(self._specs[index.name].shape) != 1:
            return None
        how = "copy" if item.target is aten.index_copy.default else "sum"
        includes = bool(item.kwargs.get("include_self", True)) and how == "sum"
        rows, how = self._constants.value(index.name), reduce[0] if reduce else how
        return RowPlacement(
            dim % len(shape), rows, index.name, source.name, how, itself.name, includes=includes
        )

    def _sliced(self, item: Operator) -> RowPlacement | None:
        """Read a slice of dim 0 that is written."""
        itself, source, *rest = item.args
        dim, start, stop, step = (*rest, *_SLICE[len(rest) :])
        shape = self._specs[itself.name].shape
        if dim % len(shape) or any(isinstance(each, Ref) for each in (start, stop, step)):
            return None
        rows = torch.arange(shape[0])[slice(start, stop, step)]
        return RowPlacement(0, rows, itself.name, source.name, "copy", itself.name)

    def _put(self, item: Operator) -> RowPlacement | None:
        """Read x[:, rows] = values."""
        itself, _, source, *accumulate = item.args
        found = self._indexed_dim(item)
        if found is None:
            return None
        adds = bool(accumulate and accumulate[0])
        how = "sum" if adds else "copy"
        return RowPlacement(*found, source.name, how, itself.name, includes=adds)

    def _indexed_dim(self, item: Operator) -> tuple[int, Tensor, str] | None:
        """The single dim that a call indexes, its rows, counted from the first one, and what says them."""
        given = [(dim, index) for dim, index in enumerate(item.args[1]) if index is not None]
        if len(given) != 1 or given[0][1].name not in self._constants:
            return None
        dim, index = given[0]
        spec = self._specs[index.name]
        if len(spec.shape) != 1 or may_learn(spec.dtype) or spec.dtype is torch.bool:
            return None
        rows, length = self._constants.value(index.name), self._shape(item.args[0])[dim]
        return dim, rows + length * (rows < 0) if bool((rows < 0).any()) else rows, index.name

    def _rows(self, index: Tensor, dim: int) -> Tensor | None:
        """The rows along `dim` by which an index names whole rows; None if it doesn't."""
        others = [place for place in range(index.dim()) if place != dim]
        if any(index.shape[place] > 1 and index.stride(place) for place in others) or not index.numel():
            return None
        for place in reversed(others):
            index = index.select(place, 0)
        return index

    def _segments(self, item: Operator) -> RowPlacement | None:
        """Read runs of rows, one after the other, whose lengths or bounds are constants."""
        (source, reduce), said = item.args, item.kwargs
        ends = said.get("lengths") or said.get("offsets")
        learns = self._specs[source.name].requires_grad
        if reduce in ("max", "min") and learns:
            return None  # torch gives each of several largest rows the whole of a negative gradient
        if ends is None or ends.name not in self._constants or len(self._specs[ends.name].shape) != 1:
            return None
        lengths = self._constants.value(ends.name)
        lengths = lengths if said.get("lengths") else lengths.diff()
        initial, count = said.get("initial"), self._specs[source.name].shape[0]
        if said.get("axis") or bool((lengths < 0).any()) or int(lengths.sum()) != count:
            return None
        index = torch.arange(len(lengths)).repeat_interleave(lengths)
        reduce = {"max": "amax", "min": "amin"}.get(reduce, reduce)
        return RowPlacement(0, index, ends.name, source.name, reduce, length=len(lengths), initial=initial)
