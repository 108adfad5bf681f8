"""Buffers for what a stage of torch receives, each in the shape of its own micro-batch.

    torch 2.13, 2.14   buffers for all micro-batches, like the first's, from before the first step for ever
    torch 2.15         a buffer at each receive, as its metadata say, until it is used

What is here is all that knows how versions of torch differ in that.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from autopar.torch_seams.required import expect, required

with required():
    from torch.distributed.pipelining.stage import _RecvInfo

MADE_AT_RECEIVES = hasattr(_RecvInfo, "allocate_buffer")
expect(MADE_AT_RECEIVES or "buffer" in inspect.signature(_RecvInfo).parameters, "buffer of _RecvInfo")


class Shaped(Protocol):
    """The shape and dtype of what is received."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


def prepare(receives: Sequence[Any], specs: Sequence[Shaped], device: torch.device) -> None:
    """Give each receive a buffer of the micro-batch's own shape."""
    for receive, spec in zip(receives, specs, strict=False):  # the first stage has arguments
        if not _takes_tensor(receive):
            continue
        if MADE_AT_RECEIVES:
            stride = torch.empty(spec.shape, device="meta").stride()
            receive.tensor_meta = replace(receive.tensor_meta, shape=torch.Size(spec.shape), stride=stride)
        else:
            receive.buffer = torch.empty(spec.shape, dtype=spec.dtype, device=device)


def take_tensors(receives: Sequence[Any]) -> bool:
    """True if some of them take a tensor, and don't stand for an argument or for no gradient."""
    return any(map(_takes_tensor, receives))


def let_go(receives: Sequence[Any], device: torch.device) -> None:
    """Free the buffers; where torch looks for one, one without memory stands for those to come."""
    for receive in receives:
        if not MADE_AT_RECEIVES and _takes_tensor(receive):
            receive.buffer = torch.empty(0, device=device)


def _takes_tensor(receive: Any) -> bool:
    if not MADE_AT_RECEIVES:
        return getattr(receive, "buffer", None) is not None
    return isinstance(receive, _RecvInfo) and not receive.is_root_arg and receive.tensor_meta is not None
