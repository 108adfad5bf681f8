"""Whatever places rows by constant indices, told as sums and reductions of rows among zeros.

    index_copy(x, i, rows)                 where(placed, index_add(zeros, i, rows), x)     no row placed twice
    index_put(x, [i], rows), scatter,
    slice_scatter(x, rows, a, b)           the same
    index_fill(x, i, 2.0)                  masked_fill(x, placed, 2.0)
    index_add(x, i, rows)                  x + index_add(zeros, i, rows)
    index_reduce(x, i, rows, "prod")       x * masked_fill(index_reduce(zeros, ...), not placed, 1)
    segment_reduce(rows, "mean", lengths)  index_reduce(zeros, i, rows, "mean"), i = 0 0 0 1 2 2 ...

`placed` is a constant: which rows the indices name. What takes them among zeros has rules by which vertices
and edges are split. Maxima that count what is there, too, and copies to one row twice stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Operator, Ref, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.torch_seams.schemas import schema_of

aten = torch.ops.aten
_EMPTY = {"sum": 0.0, "prod": 1.0, "mean": math.nan, "amax": -math.inf, "amin": math.inf}


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """Rows of `source` along `dim` that go to the rows `index` of `into`, or of nothing but a `length`.

    `reduce` is "copy", or how rows that meet are reduced, with what is there if it `includes` that.
    """

    dim: int
    index: Tensor
    source: str
    reduce: str
    into: str | None = None
    length: int = 0
    includes: bool = False
    initial: float | None = None


class RowPlacer:
    """Writes the operators that place rows, with constants that `constant` names, into `specs`."""

    def __init__(
        self,
        specs: dict[str, TensorSpec],
        makers: Mapping[str, Operator],
        constant: Callable[[Tensor, str, torch.dtype], str],
    ) -> None:
        self.specs, self.makers, self.constant = specs, makers, constant
        self.written: list[Operator] = []

    def write(self, item: Operator, placed: RowPlacement) -> list[Operator] | None:
        """Operators that do what `item` does, None if it has to stay as it is."""
        self.item, self.placed, self.written = item, placed, []
        length = self.specs[placed.into].shape[placed.dim] if placed.into else placed.length
        if len(placed.index) and not 0 <= int(placed.index.min()) <= int(placed.index.max()) < length:
            return None  # which is refused where it is checked
        self.count = torch.bincount(placed.index, minlength=length)
        if not self.can():
            return self.by_rows()
        if not self.is_filled():
            self.emit(aten.alias.default, Ref(self.placed.into or self.zeros()))
        elif self.placed.into is None or self.is_zero(self.placed.into):
            self.among_zeros()
        else:
            self.into_rows(self.placed.into)
        *others, last = self.written
        self.written = [*others, replace(last, results=item.results, name=item.name)]
        return self.written

    def can(self) -> bool:
        placed = self.placed
        requires_grad = self.specs[placed.source].dtype.is_floating_point
        if placed.includes and placed.into is not None and placed.reduce in ("amax", "amin", "prod"):
            requires_grad = requires_grad and placed.reduce == "prod" and not self.is_zero(placed.into)
        return requires_grad and (placed.reduce != "copy" or int(self.count.max()) <= 1)

    def by_rows(self) -> list[Operator] | None:
        """The operator as it is, with an index for each row in the place of one for each element."""
        placed = self.placed
        if self.item.target is not aten.scatter_reduce.two or placed.reduce in ("sum", "copy"):
            return None
        index = Ref(self.constant(placed.index, f"{self.item.name}_rows", placed.index.dtype))
        args = (self.item.args[0], placed.dim, index, Ref(placed.source), placed.reduce)
        kwargs = {"include_self": placed.includes}
        return [replace(self.item, target=aten.index_reduce.default, args=args, kwargs=kwargs)]

    def is_filled(self) -> bool:
        """Whether the placement fills any rows."""
        return bool(len(self.placed.index)) or self.placed.into is None

    def is_zero(self, name: str) -> bool:
        return name in self.makers and facts_of(self.makers[name].target).is_zero

    # -- the forms ------------------------------------------------------------------------------------

    def among_zeros(self) -> None:
        """Rows placed where nothing was."""
        placed, rows = self.placed, self.reduced()
        if placed.into is not None:  # of zeros
            if placed.reduce == "mean" and placed.includes:
                share = self.column(self.shares * self.count, "share")
                self.emit(aten.mul.Tensor, Ref(rows), Ref(share))
            return
        start = placed.initial
        if placed.reduce == "sum":
            if start:
                self.emit(aten.add.Scalar, Ref(rows), start)
            return
        if start is not None:
            rows = self.started(rows, start)
        empty = _EMPTY[placed.reduce] if start is None else start
        if bool((self.count == 0).any()) and not (empty == 0.0 and placed.reduce != "prod"):
            self.emit(aten.masked_fill.Scalar, Ref(rows), Ref(self.mask(self.count == 0, "empty")), empty)

    def started(self, rows: str, start: float) -> str:
        """Reduced rows, each with an initial value."""
        match self.placed.reduce:
            case "prod":
                return rows if start == 1 else self.emit(aten.mul.Scalar, Ref(rows), start)
            case "mean":
                share = self.column(start / self.count.double().clamp(min=1), "start")
                return rows if not start else self.emit(aten.add.Tensor, Ref(rows), Ref(share))
            case reduce:
                bound = aten.clamp.default
                ends = (start, None) if reduce == "amax" else (None, start)
                return self.emit(bound, Ref(rows), *ends)

    def into_rows(self, into: str) -> None:
        """Rows placed among others."""
        placed = self.placed
        if placed.reduce == "prod" and placed.includes:
            rows = self.reduced()
            if bool((self.count == 0).any()):
                empty = Ref(self.mask(self.count == 0, "empty"))
                rows = self.emit(aten.masked_fill.Scalar, Ref(rows), empty, 1.0)
            self.emit(aten.mul.Tensor, Ref(into), Ref(rows))
        elif placed.reduce in ("sum", "mean") and placed.includes:
            self.placed = replace(placed, reduce="sum")
            rows = self.emit(aten.add.Tensor, Ref(into), Ref(self.reduced()))
            if placed.reduce == "mean":
                share = self.column(self.shares, "share")
                self.emit(aten.mul.Tensor, Ref(rows), Ref(share))
        elif bool((self.count == 0).any()):
            mask = Ref(self.mask(self.count > 0, "placed"))
            self.emit(aten.where.self, mask, Ref(self.reduced()), Ref(into))
        else:
            self.reduced()

    def reduced(self) -> str:
        """The rows, reduced among zeros."""
        placed, zeros = self.placed, Ref(self.zeros())
        index = Ref(self.constant(placed.index, f"{self.item.name}_rows", placed.index.dtype))
        args = (zeros, placed.dim, index, Ref(placed.source))
        if placed.reduce in ("sum", "copy"):
            return self.emit(aten.index_add.default, *args)
        return self.emit(aten.index_reduce.default, *args, placed.reduce, include_self=False)

    @property
    def shares(self) -> Tensor:
        """Each row's share of the mean of itself and the rows that are placed on it."""
        return 1 / (self.count.double() + 1)

    # -- constants and operators ------------------------------------------------------------------------

    def shape(self) -> tuple[int, ...]:
        source = list(self.specs[self.placed.source].shape)
        source[self.placed.dim] = len(self.count)
        return tuple(source)

    def zeros(self) -> str:
        if self.placed.into is not None and self.is_zero(self.placed.into):
            return self.placed.into
        made = {"dtype": self.specs[self.placed.source].dtype, "device": torch.device("cpu")}
        return self.emit(aten.zeros.default, [*self.shape()], requires_grad=False, **made)

    def mask(self, rows: Tensor, name: str) -> str:
        """A constant of flags, one for each row."""
        return self.constant(self.spread(rows), f"{self.item.name}_{name}", rows.dtype)

    def spread(self, rows: Tensor) -> Tensor:
        """One element for each row, as it is broadcast to all of them."""
        shape = [1] * len(self.shape())
        shape[self.placed.dim] = len(rows)
        return rows.view(shape)

    def column(self, rows: Tensor, name: str) -> str:
        """A constant of numbers, one for each row."""
        dtype = self.specs[self.placed.source].dtype
        return self.constant(self.spread(rows.double()), f"{self.item.name}_{name}", dtype)

    def emit(self, target: Any, *args: Any, requires_grad: bool = True, **kwargs: Any) -> str:
        """Write an operator that makes a tensor of the result's shape, and give its name."""
        result = self.item.results[0]
        assert result is not None
        spec = self.specs[result]
        name = f"{result}_{schema_of(target).name.partition('::')[2]}_{len(self.written)}"
        self.specs[name] = spec if requires_grad else replace(spec, requires_grad=False)
        made = replace(
            self.item, name=name, target=target, args=args, kwargs=kwargs, results=(name,), order=()
        )
        self.written.append(made)
        return name
