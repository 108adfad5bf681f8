"""One device for a trace: the model's, wherever the tensors of a call lie.

    model on the CPU, or meta        batch on the GPU        traced on the CPU, or meta

A program brings what it takes to its rank's device by itself, so where an example lies says nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.trace.call_signature import Arguments


def device_of(model: nn.Module, arguments: Arguments) -> torch.device:
    """The device of the model's parameters, or of what else there is."""
    tensors = (*model.parameters(), *model.buffers(), *arguments.tensors)
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def beside(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, or one like it on `device`, without values: a trace reads none."""
    if tensor.device == device:
        return tensor
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if device.type not in ("cpu", "meta"):  # whose memory is taken at once
        like.untyped_storage().resize_(0)
    return like.requires_grad_(tensor.requires_grad)
