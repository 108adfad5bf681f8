"""Parameters and gradients of parallel modules, whole, whether they are DTensors or torch's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_of(tensor: Any) -> Tensor:
    """The full tensor on every rank; a collective for DTensors."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full
