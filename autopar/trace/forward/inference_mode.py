"""Traces calls that are made in torch.inference_mode.

Its tensors count no writes, by which a trace tells what still has the values of a call's inputs. Code that
asks for the mode hears that it is on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from autopar.torch_seams.tracing import inference_asked


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Outside of the mode, as a decorator too; whether gradients are recorded stays as it was."""
    records = torch.is_grad_enabled()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(inference_asked.replaced(_is_users))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(records))
        yield


def _is_users() -> bool:
    """Whether the caller is code outside of torch."""
    return str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] != "torch"


def counting_writes(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, those of the mode as copies; one that comes twice is one copy."""
    copies = {id(tensor): tensor.clone() for tensor in tensors if tensor.is_inference()}
    return tuple(copies.get(id(tensor), tensor) for tensor in tensors)
