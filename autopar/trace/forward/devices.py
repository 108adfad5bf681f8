"""One device for a trace: the model's, wherever the tensors of a call lie.

    model on the CPU, or meta        batch on the GPU        traced on the CPU, or meta

A program brings what it takes to its rank's device by itself, so where an example lies says nothing.

A forward that makes tensors on CPUs, as one that names no device does, adds none of them to tensors of the
meta device. A model without memory is a plan's stand-in for one that has it: then it is traced as on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.torch_seams.fakes import FakeTensorDeviceMismatchError, MetaTensorDescriber
from autopar.torch_seams.tensors import is_view
from autopar.torch_seams.tracing import described_tensor
from autopar.trace.call.call_signature import Arguments

Result = TypeVar("Result")
_CPU = torch.device("cpu")


def devices_of(model: nn.Module, arguments: Arguments) -> list[torch.device]:
    """The devices of the model's parameters and buffers, the one that most of them are on first; of what else
    there is if it has none."""
    held = Counter(tensor.device for tensor in (*model.parameters(), *model.buffers()))
    held = held or Counter(tensor.device for tensor in arguments.tensors)
    return [device for device, _ in held.most_common()] or [torch.device("cpu")]


def beside(tensor: Tensor, devices: Sequence[torch.device]) -> Tensor:
    """Return a tensor that is on one of the `devices`, where need be one without values on the first.

    A trace reads no values. A view of meta tensors has memory of its own, as torch.export takes its sizes for
    unknown."""
    if tensor.device in devices and not (tensor.is_meta and is_view(tensor)):
        return tensor
    device = tensor.device if tensor.device in devices else devices[0]
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if device.type not in ("cpu", "meta"):  # whose memory is taken at once
        like.untyped_storage().resize_(0)
    return like.requires_grad_(tensor.requires_grad)


def on_one_device(run: Callable[[], Result], devices: Sequence[torch.device]) -> Result:
    """Result of `run`, a trace on `devices`; it runs again as on a CPU if meta tensors meet those of CPUs."""
    try:
        return run()
    except FakeTensorDeviceMismatchError:
        if all(device.type != "meta" for device in devices):
            raise
    with _meta_as_cpu():
        return run()


@contextmanager
def _meta_as_cpu() -> Iterator[None]:
    """Context in which traces take tensors of the meta device for those of a CPU."""
    describe = described_tensor.now

    def described(self: MetaTensorDescriber, tensor: Tensor, **how: Any) -> Any:
        found = describe(self, tensor, **how)
        return replace(found, device=_CPU) if found.device.type == "meta" else found

    with described_tensor.replaced(described):
        yield
