"""What forward makes without gradients inside of autocast has none.

    with autocast:                      torch.export (2.13) keeps the region of autocast alone:
        with no_grad:                   y's gradient would reach x
            y = f(x)                    traced as y = f(x).detach()

A region of no_grad elsewhere is in what torch.export gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.torch_seams.pytree import tree_map_only
from autopar.trace.forward.autocast import KERNELS


class ConstantRegions(TorchFunctionMode):
    """Detaches results of calls under no_grad and autocast, of a forward that begins with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.learns = torch.is_grad_enabled()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.learns or torch.is_grad_enabled() or _writes(function):
            return result
        if not any(map(torch.is_autocast_enabled, KERNELS)):
            return result
        return tree_map_only(Tensor, _detached, result)


def _writes(function: Any) -> bool:
    """Whether a call gives back the tensor that it writes."""
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_floating_point() else tensor
