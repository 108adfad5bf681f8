"""Products of groups of rows with a matrix for each group, of any lengths: those of experts.

    rows [t, i]     matrices [e, i, o]     offsets [e], where each group ends     ->  [t, o]

torch's kernel takes rows of 16 bytes and their multiples only, which a rank's part of i or o may not be: such
parts get columns of zeros for the time. Everywhere it takes bfloat16 alone; in other dtypes, as in float64 in
which proofs compute, groups are multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.trace.forms.sparse_products import NAMESPACE

aten = torch.ops.aten
ALIGNMENT = 16  # bytes of rows, in torch's kernel
DTYPES = (torch.bfloat16,)  # of torch's kernel, whatever the device
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")


def _grouped_mm(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    if rows.dtype not in DTYPES:
        products: Tensor = _products(rows, matrices, offsets)
        return products
    step, (inner, outer) = ALIGNMENT // rows.element_size(), matrices.shape[1:]
    inner_zeros, outer_zeros = -inner % step, -outer % step
    if inner_zeros:
        rows = aten.constant_pad_nd.default(rows, [0, inner_zeros])
    if inner_zeros or outer_zeros:
        matrices = aten.constant_pad_nd.default(matrices, [0, outer_zeros, 0, inner_zeros])
    found: Tensor = aten._grouped_mm.default(rows.contiguous(), matrices, offsets)
    return found.narrow(1, 0, outer) if outer_zeros else found


def _spans(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """The groups that have rows."""
    start = 0
    for number, stop in enumerate(offsets.tolist()):
        if start < stop:
            yield number, slice(start, stop)
        start = stop


@torch.library.custom_op(f"{NAMESPACE}::products_by_group", mutates_args=())
def _products(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Each group of rows times its matrix: [t, o]; rows of no group give zeros."""
    found = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for number, span in _spans(offsets):
        torch.mm(rows[span], matrices[number], out=found[span])
    return found


@torch.library.custom_op(f"{NAMESPACE}::sums_by_group", mutates_args=())
def _sums(rows: Tensor, others: Tensor, offsets: Tensor) -> Tensor:
    """Each group of rows, transposed, times those of `others`: [e, i, o]."""
    found = rows.new_zeros(offsets.shape[0], rows.shape[1], others.shape[1])
    for number, span in _spans(offsets):
        torch.mm(rows[span].T, others[span], out=found[number])
    return found


@_products.register_fake
def _(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@_sums.register_fake
def _(rows: Tensor, others: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(offsets.shape[0], rows.shape[1], others.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _products_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, matrices, offsets = ctx.saved_tensors
    first, second, _ = ctx.needs_input_grad
    return (
        _products(gradient, matrices.mT, offsets) if first else None,
        _sums(rows, gradient, offsets) if second else None,
        None,
    )


def _sums_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, others, offsets = ctx.saved_tensors
    first, second, _ = ctx.needs_input_grad
    return (
        _products(others, gradient.mT, offsets) if first else None,
        _products(rows, gradient, offsets) if second else None,
        None,
    )


_products.register_autograd(_products_backward, setup_context=_save)
_sums.register_autograd(_sums_backward, setup_context=_save)

_library.define("grouped_mm(Tensor rows, Tensor matrices, Tensor offsets) -> Tensor")
_library.impl("grouped_mm", _grouped_mm, "CompositeImplicitAutograd")
GROUPED_MM: Any = torch.ops.autopar_graphs.grouped_mm.default
