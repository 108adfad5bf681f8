"""Products of groups of rows with a matrix for each group, of any lengths: those of experts.

    rows [t, i]     matrices [e, i, o]     offsets [e], where each group ends     ->  [t, o]

torch's kernel takes rows of 16 bytes and their multiples only, which a rank's part of i or o may not be: such
parts get columns of zeros for the time. Everywhere it takes bfloat16 alone; in other dtypes, as in float64 in
which proofs compute, each matrix takes all rows, those of other groups as zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.trace.sparse_products import NAMESPACE

aten = torch.ops.aten
ALIGNMENT = 16  # bytes of rows, in torch's kernel
DTYPES = (torch.bfloat16,)  # of torch's kernel, whatever the device
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")


def _grouped_mm(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    if rows.dtype not in DTYPES:
        return _one_by_one(rows, matrices, offsets)
    step, (inner, outer) = ALIGNMENT // rows.element_size(), matrices.shape[1:]
    inner_zeros, outer_zeros = -inner % step, -outer % step
    if inner_zeros:
        rows = aten.constant_pad_nd.default(rows, [0, inner_zeros])
    if inner_zeros or outer_zeros:
        matrices = aten.constant_pad_nd.default(matrices, [0, outer_zeros, 0, inner_zeros])
    found: Tensor = aten._grouped_mm.default(rows.contiguous(), matrices, offsets)
    return found.narrow(1, 0, outer) if outer_zeros else found


def _one_by_one(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    places = torch.arange(len(rows), device=rows.device)
    group = torch.searchsorted(offsets, places.to(offsets.dtype), right=True).unsqueeze(1)
    found = rows.new_zeros(len(rows), matrices.shape[2])
    for number, matrix in enumerate(matrices):
        found = found + (rows * (group == number)) @ matrix
    return found


_library.define("grouped_mm(Tensor rows, Tensor matrices, Tensor offsets) -> Tensor")
_library.impl("grouped_mm", _grouped_mm, "CompositeImplicitAutograd")
GROUPED_MM: Any = torch.ops.autopar_graphs.grouped_mm.default
