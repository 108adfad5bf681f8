"""Rows that a graph's structure picks and places, as two operators whose indices are constants.

    pick(x, index)                        x[index]                          index_select(x, 0, index)
    place(rows, index, length, "sum")     y[i] = sum of rows with index i   index_add, index_reduce of zeros

`place` takes amax, amin, mean and prod as well; a row that nothing is placed at is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.trace.forms.sparse_products import NAMESPACE

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
