"""How tensors lie in memory: in NCHW, or channels-last where the user's images are.

contiguous       n, c, h, w     strides  chw, hw, w, 1
channels last    n, h, w, c     strides  hwc, 1, wc, c
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format(x: Tensor) -> torch.memory_format:
    """The format in which `x` lies, a slice of it too; where both fit, contiguous."""
    last = _CHANNELS_LAST.get(x.dim())
    if last is None or x.is_contiguous() or x.stride(1) != 1 or x.shape[1] == 1:
        return torch.contiguous_format
    strides = [x.stride(dim) for dim in (*range(2, x.dim()), 1)]
    return last if strides == sorted(strides, reverse=True) else torch.contiguous_format


def dense(x: Tensor, format: torch.memory_format | None = None) -> Tensor:
    """`x` without gaps, in its own memory format or in `format`; itself if it lies so."""
    return x.contiguous(memory_format=format or memory_format(x))


def settled(x: Tensor) -> Tensor:
    """`x` with its own values in memory, not their conjugates or negatives, which torch may only have noted.

    A process group reads memory and knows nothing of such notes. Itself, but for complex numbers or
    imaginary parts of them.
    """
    return x.resolve_conj().resolve_neg()
