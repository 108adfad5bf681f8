"""Traces calls that are made in torch.inference_mode.

Its tensors count no writes, by which a trace tells what still has the values of a call's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Outside of the mode, as a decorator too; whether gradients are recorded stays as it was."""
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield


def counting_writes(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, those of the mode as copies; one that comes twice is one copy."""
    copies = {id(tensor): tensor.clone() for tensor in tensors if tensor.is_inference()}
    return tuple(copies.get(id(tensor), tensor) for tensor in tensors)
