"""Rows that a mask keeps, given back to a tensor: `y.index_add_(0, i, rows)`, `y[i] += rows`, `y[i] = rows`.

    added      y + sum over the mask's other dims of where(mask, rows, 0)
    put        where(any of the mask's other dims, that sum, y), or added where y is zero at these places

By `+=` and `=` only where no place is there twice: eager code then takes one of the rows, nobody knows which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, Operator, Ref
from autopar.trace.write.element_numbers import keeps_one
from autopar.trace.write.mask_rows import BY_CHOOSING, MaskRows, Places, SelectedRows

aten = torch.ops.aten

RETURNS = (aten.index_add.default, aten.index_put.default)
BY_ADDING = f"add by y.index_add_(0, places, rows), which sums in any case; {BY_CHOOSING}"
_WIDEST = 1 << 63  # numbers of 64 bits are below
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


@dataclass(frozen=True, slots=True)
class _Given:
    """Rows that are added to those of `into` whose places the dims of a mask are, or put there."""

    into: Ref
    mask: Ref
    dims: tuple[int, ...]
    rows: SelectedRows
    is_put: bool = False


@dataclass(frozen=True, slots=True)
class _Filled:
    """Where a tensor need not be zero: where these keys are one of these numbers."""

    keys: int = -1  # as `EqualTensors` numbers them
    numbers: frozenset[int] = frozenset()

    def has(self, keys: int, number: int) -> bool:
        """Whether it need not be zero somewhere where the keys are this number."""
        return bool(self.numbers) and (keys != self.keys or number in self.numbers)


class ReturnedRows:
    """Writes what becomes of tensors to which kept rows are given back."""

    def __init__(self, rows: MaskRows) -> None:
        self.rows = rows
        self.written: set[str] = set()  # rows that are given back, zeros where a mask keeps nothing
        self.reads: dict[fx.Node, tuple[Any, ...]] = {}  # what `index` took, and by what
        self._filled: dict[str, _Filled] = {}  # tensors that are zero elsewhere

    def write(self, node: fx.Node, call: Call) -> Ref:
        """What becomes of a tensor to which those rows are given back that a mask keeps."""
        given = self._given(node, call)
        into, mask, dims, rows = given.into, given.mask, given.dims, given.rows
        graph, specs = self.rows.graph, self.rows.graph.specs
        spec, shape = specs[into.name], specs[mask.name].shape
        whole = replace(self.rows.spec(rows), shape=(*shape, *spec.shape[len(dims) :]))
        if self.rows.flat(node, mask) != rows.mask or spec.dtype != self.rows.spec(rows).dtype:
            raise self.rows.refused(node, f"{call.target} of rows of another mask or kind")
        if spec.shape[: len(dims)] != tuple(shape[dim] for dim in dims):
            raise self.rows.refused(node, f"{call.target} to {spec.shape[0]} rows, of a mask of {shape}")
        if math.prod(whole.shape) != math.prod(self.rows.spec(rows).shape):
            raise self.rows.refused(node, f"{call.target} of rows of another width")
        made = self.rows.filled(node, rows.ref.name, rows.mask, 0)
        self.written.add(made)
        made = self.rows.reshaped(node, made, whole.shape)
        others = [dim for dim in range(len(shape)) if dim not in dims]
        if others:
            summed = replace(whole, shape=spec.shape)
            made = graph.add(node, aten.sum.dim_IntList, (Ref(made), others), summed)
        spec = replace(spec, requires_grad=spec.requires_grad or specs[made].requires_grad)
        before, compared = self._filled_before(into.name), None if others else self._compared(mask)
        is_free = before is not None and not (before.numbers if compared is None else before.has(*compared))
        if given.is_put and not is_free:
            there = self._there(node, mask, others, len(spec.shape) - len(dims))
            return Ref(graph.add(node, aten.where.self, (there, Ref(made), into), spec))
        added = graph.add(node, aten.add.Tensor, (into, Ref(made)), spec)
        if before is not None and compared is not None and is_free:
            self._filled[added] = _Filled(compared[0], before.numbers | {compared[1]})
        return Ref(added)

    def _there(self, node: fx.Node, mask: Ref, others: list[int], further: int) -> Ref:
        """Where a mask keeps anything along its other dims, beside so many further dims."""
        spec = self.rows.graph.specs[mask.name]
        if others:
            spec = replace(
                spec, shape=tuple(size for dim, size in enumerate(spec.shape) if dim not in others)
            )
            mask = Ref(self.rows.graph.add(node, aten.any.dims, (mask, others), spec))
        return Ref(self.rows.reshaped(node, mask.name, (*spec.shape, *(1 for _ in range(further)))))

    def _filled_before(self, name: str) -> _Filled | None:
        """Where a tensor may not be zero; None for anything else than zeros with rows in them."""
        if name in self._filled:
            return self._filled[name]
        maker = self._maker(name)
        return _Filled() if maker is not None and maker.target in _ZEROS else None

    def _compared(self, mask: Ref) -> tuple[int, int] | None:
        """The keys that a mask compares with a number, and this; None for another mask, and for keys of which
        other numbers may be equal to it in their dtype."""
        maker = self._maker(mask.name)
        if maker is None or maker.target is not aten.eq.Scalar or type(number := maker.args[1]) is not int:
            return None
        keys = maker.args[0].name
        if self.rows.graph.specs[keys].dtype is not torch.int64 or not -_WIDEST <= number < _WIDEST:
            return None
        return self.rows.equal.number(keys, self.rows.graph.operators), number

    def _maker(self, name: str) -> Operator | None:
        operators = reversed(self.rows.graph.operators)
        return next((item for item in operators if name in item.results), None)

    def _given(self, node: fx.Node, call: Call) -> _Given:
        """The parts of `y.index_add_(0, i, rows)`, of `y[i] += rows`, or of `y[i] = rows`.

        The mask's dims are those that the tensor's first ones are.
        """
        match call:
            case Call(aten.index_add.default, (Ref() as into, 0, Places() as places, SelectedRows() as rows)):
                if places.dim is not None and not call.kwargs:
                    return _Given(into, places.mask, (places.dim,), rows)
            case Call(aten.index_put.default, (Ref() as into, [*index], SelectedRows() as rows, True)) if (
                None not in index
            ):
                picked = self.rows.picked(node, (into, index))
                if picked is not None and not call.kwargs and picked[2] == tuple(sorted(picked[2])):
                    return _Given(into, *picked[1:], rows)
            case Call(aten.index_put.default, (Ref() as into, [*index], SelectedRows() as rows)) if (
                None not in index
            ):
                picked, term = self.rows.picked(node, (into, index)), self._term(node, (into, index))
                if picked is not None and not call.kwargs:
                    mask, dims = self._once(node, *picked[1:])
                    if term is None:
                        return _Given(into, mask, dims, rows, is_put=True)
                    return _Given(into, mask, dims, self._promoted(node, into, term))
        raise self.rows.refused(node, str(call.target))

    def _once(self, node: fx.Node, mask: Ref, dims: tuple[int, ...]) -> tuple[Ref, tuple[int, ...]]:
        """The mask and its dims, if no place along these is there twice: `y[i] += rows` adds only one row."""
        makers = {name: item for item in self.rows.graph.operators for name in item.results if name}
        specs = self.rows.graph.specs
        others = [dim for dim, size in enumerate(specs[mask.name].shape) if dim not in dims and size != 1]
        once = not others or len(others) == 1 and keeps_one(mask.name, others[0], makers, specs)
        if not once or dims != tuple(sorted(dims)):
            raise self.rows.refused(
                node,
                "y[i] += or = rows at places that may repeat, where one row wins, or are turned",
                BY_ADDING,
            )
        return mask, dims

    def _term(self, node: fx.Node, read: tuple[Any, ...]) -> SelectedRows | None:
        """The rows that `y[i] += rows` adds."""
        added = node.args[2]
        if not isinstance(added, fx.Node) or added.target not in (aten.add.Tensor, aten.add_.Tensor):
            return None
        index, rows = added.args[0], self.rows.graph.value(added.args[1])
        same = isinstance(index, fx.Node) and self.reads.get(index) == read  # and not written in between
        return rows if same and isinstance(rows, SelectedRows) and not added.kwargs else None

    def _promoted(self, node: fx.Node, into: Ref, rows: SelectedRows) -> SelectedRows:
        """The rows in the dtype of a tensor to which `+=` adds them, where that is the sum's."""
        spec, dtype = self.rows.spec(rows), self.rows.spec(into).dtype
        if spec.dtype == dtype or torch.promote_types(spec.dtype, dtype) != dtype:
            return rows
        made = self.rows.graph.add(node, aten.to.dtype, (rows.ref, dtype), replace(spec, dtype=dtype))
        return SelectedRows(Ref(made), rows.mask)
