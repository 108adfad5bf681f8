"""`as_strided` of a dense tensor, as operators on elements: a reshape, windows, and an order of dims.

    x       (B, 6, D)         strides (6 D, D, 1)
    result  (B, 3, 2, D)      strides (6 D, 2 D, D, 1)      x as (B, 3, 2, D): each row once
    result  (B, 5, 2, D)      strides (6 D, D, D, 1)        x.unfold(1, size=2, step=1): rows overlap

From the smallest stride up each dim of the result is one of the memory, or two of them, of which the second
begins before the first ends, are windows of one. A tensor whose dims lie in another order in memory, as a
transposed one, is read as that one. What reads the memory otherwise stays `as_strided`, and
is refused where the graph is written (`graph_builder`). So do views whose sizes are symbols: those that
torch.export itself makes of tensors that it meets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim of the memory, `length` long, of which the result takes the first `count` elements.

    With `window` it takes as many windows of so many elements, one every `step`.
    """

    length: int
    count: int
    window: int | None = None
    step: int = 1


def windows(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor | None:
    """`x.as_strided(size, stride, offset)` by operators on elements; None if none give it."""
    strides = x.stride()
    if any(isinstance(each, torch.SymInt) for each in (*size, *stride, *x.shape, *strides)):
        return None
    x = x.permute(sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim)))
    if not x.is_contiguous() or offset not in (None, x.storage_offset()) or len(size) != len(stride):
        return None
    wide = [dim for dim, count in enumerate(size) if count != 1]
    order = sorted(wide, key=lambda dim: (-stride[dim], dim))
    dims = _dims([size[dim] for dim in order], [stride[dim] for dim in order], x.numel())
    if dims is None:
        return None
    found = _taken(x, dims)
    found = found.permute([order.index(dim) for dim in wide])
    for dim, count in enumerate(size):
        found = found.unsqueeze(dim) if count == 1 else found
    return found


def _dims(counts: Sequence[int], strides: Sequence[int], numel: int) -> list[_Dim] | None:
    """The dims of a memory of `numel` elements, by dims of the result whose strides fall."""
    dims: list[_Dim] = []
    place, inner = len(counts) - 1, 1
    while place >= 0:
        count, stride = counts[place], strides[place]
        if stride != inner or not count:
            return None
        overlaps = place > 0 and strides[place - 1] < stride * count
        outer = place - 2 if overlaps else place - 1
        inner = strides[outer] if outer >= 0 else numel - numel % stride
        step = strides[place - 1] // stride if overlaps else 1
        rows = (counts[place - 1] - 1) * step + count if overlaps else count
        if inner % stride or inner < rows * stride or overlaps and strides[place - 1] % stride:
            return None
        length = inner // stride
        dims.insert(0, _Dim(length, counts[place - 1], count, step) if overlaps else _Dim(length, count))
        place = outer
    return dims


def _taken(x: Tensor, dims: Sequence[_Dim]) -> Tensor:
    """Memory of `x` that the result takes; windows follow the dim that counts them."""
    lengths = [dim.length for dim in dims]
    if math.prod(lengths) < x.numel():
        x = x.flatten().narrow(0, 0, math.prod(lengths))
    x, place = x.reshape(lengths), 0
    for dim in dims:
        if dim.window is not None:
            x = x.unfold(place, dim.window, dim.step).movedim(-1, place + 1)
        x = x.narrow(place, 0, dim.count) if dim.count < x.shape[place] else x
        place += 1 if dim.window is None else 2
    return x
