"""One device for a trace: the model's, wherever the tensors of a call lie.

    model on the CPU, or meta        batch on the GPU        traced on the CPU, or meta

A program brings what it takes to its rank's device by itself, so where an example lies says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autopar.trace.call_signature import Arguments


def devices_of(model: nn.Module, arguments: Arguments) -> list[torch.device]:
    """The devices of the model's parameters and buffers, the one that most of them are on first; of what else
    there is if it has none."""
    held = Counter(tensor.device for tensor in (*model.parameters(), *model.buffers()))
    held = held or Counter(tensor.device for tensor in arguments.tensors)
    return [device for device, _ in held.most_common()] or [torch.device("cpu")]


def beside(tensor: Tensor, devices: Sequence[torch.device]) -> Tensor:
    """Return a tensor that is on one of the `devices`, where need be one without values on the first.

    A trace reads no values."""
    if tensor.device in devices:
        return tensor
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=devices[0])
    if devices[0].type not in ("cpu", "meta"):  # whose memory is taken at once
        like.untyped_storage().resize_(0)
    return like.requires_grad_(tensor.requires_grad)
