"""Backward in float64, in which torch's convolutions go sample by sample.

CPUs have no float64 kernel for a batch: each sample is a matrix product, at whose end all threads meet.
Where products are small the meeting takes longer than they do, the more so beside other busy processes.

    256 samples, 64 x 64 channels, 8 x 8 pixels, two busy cores    2 threads  0.26 processor seconds
                                                                   1 thread   0.10
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from autopar.cost.machine.threads import using_threads
from autopar.torch_seams.modes import TorchDispatchMode

SMALL_PRODUCT_FLOPS = 1e8  # flops of one sample's product, some milliseconds of a core


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
    """Autograd's backward, with small float64 convolutions on one thread."""
    many = torch.get_num_threads() > 1
    with _SmallOnOneThread() if many else nullcontext():  # type: ignore[no-untyped-call]
        torch.autograd.backward(roots, gradients)


class _SmallOnOneThread(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution_backward.default and is_small(*args):
            with using_threads(1):
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def is_small(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> bool:
    """Whether a convolution's backward on a CPU consists of small products, one for each sample."""
    transposed = rest[4]  # after sizes of the bias, stride, padding, dilation
    positions = math.prod((x if transposed else gradient).shape[2:])
    on_cpu = x.dtype is torch.float64 and x.device.type == "cpu"
    return on_cpu and 2 * positions * weight.numel() < SMALL_PRODUCT_FLOPS
