"""Rows that a mask keeps, given back to a tensor: `y.index_add_(0, i, rows)`, `y[i] += rows`.

    y + sum over the mask's other dims of where(mask, rows, 0)

By `+=` only where no place is there twice: eager code then adds one of the rows, nobody knows which.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, Ref
from autopar.trace.write.element_numbers import keeps_one
from autopar.trace.write.mask_rows import BY_CHOOSING, MaskRows, Places, SelectedRows

aten = torch.ops.aten

RETURNS = (aten.index_add.default, aten.index_put.default)
BY_ADDING = f"add by y.index_add_(0, places, rows), which sums in any case; {BY_CHOOSING}"


class ReturnedRows:
    """Writes what becomes of tensors to which kept rows are added."""

    def __init__(self, rows: MaskRows) -> None:
        self.rows = rows
        self.written: set[str] = set()  # rows that are given back, zeros where a mask keeps nothing
        self.reads: dict[fx.Node, tuple[Any, ...]] = {}  # what `index` took, and by what

    def write(self, node: fx.Node, call: Call) -> Ref:
        """What becomes of a tensor to whose rows those that a mask keeps are added."""
        into, mask, dims, rows = self._added(node, call)
        specs = self.rows.graph.specs
        given, shape = specs[into.name], specs[mask.name].shape
        whole = replace(self.rows.spec(rows), shape=(*shape, *given.shape[len(dims) :]))
        if self.rows.flat(node, mask) != rows.mask or given.dtype != self.rows.spec(rows).dtype:
            raise self.rows.refused(node, f"{call.target} of rows of another mask or kind")
        if given.shape[: len(dims)] != tuple(shape[dim] for dim in dims):
            raise self.rows.refused(node, f"{call.target} to {given.shape[0]} rows, of a mask of {shape}")
        if math.prod(whole.shape) != math.prod(self.rows.spec(rows).shape):
            raise self.rows.refused(node, f"{call.target} of rows of another width")
        made = self.rows.filled(node, rows.ref.name, rows.mask, 0)
        self.written.add(made)
        made = self.rows.reshaped(node, made, whole.shape)
        others = [dim for dim in range(len(shape)) if dim not in dims]
        if others:
            summed = replace(whole, shape=given.shape)
            made = self.rows.graph.add(node, aten.sum.dim_IntList, (Ref(made), others), summed)
        learns = given.requires_grad or specs[made].requires_grad
        spec = replace(given, requires_grad=learns)
        return Ref(self.rows.graph.add(node, aten.add.Tensor, (into, Ref(made)), spec))

    def _added(self, node: fx.Node, call: Call) -> tuple[Ref, Ref, tuple[int, ...], SelectedRows]:
        """The tensor, mask, dims and rows of `y.index_add_(0, i, rows)`, or of `y[i] += rows`.

        The mask's dims are those that the tensor's first ones are.
        """
        match call:
            case Call(aten.index_add.default, (Ref() as into, 0, Places() as places, SelectedRows() as rows)):
                if places.dim is not None and not call.kwargs:
                    return into, places.mask, (places.dim,), rows
            case Call(aten.index_put.default, (Ref() as into, [*index], SelectedRows())) if None not in index:
                picked, term = self.rows.picked(node, (into, index)), self._term(node, (into, index))
                if picked is not None and term is not None and not call.kwargs:
                    return into, *self._once(node, *picked[1:]), self._promoted(node, into, term)
        raise self.rows.refused(node, str(call.target))

    def _once(self, node: fx.Node, mask: Ref, dims: tuple[int, ...]) -> tuple[Ref, tuple[int, ...]]:
        """The mask and its dims, if no place along these is there twice: `y[i] += rows` adds only one row."""
        makers = {name: item for item in self.rows.graph.operators for name in item.results if name}
        specs = self.rows.graph.specs
        others = [dim for dim, size in enumerate(specs[mask.name].shape) if dim not in dims and size != 1]
        once = not others or len(others) == 1 and keeps_one(mask.name, others[0], makers, specs)
        if not once or dims != tuple(sorted(dims)):
            raise self.rows.refused(
                node, "y[i] += rows at places that may repeat, where one row wins,", BY_ADDING
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
