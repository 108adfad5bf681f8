"""Tensors that are assigned to `.data` and `.grad` of parameters outside the program.

    parameter.data = average       the parameter takes the average's memory, as a serial one does
    parameter.data = plain         its part of the rows of a plain tensor, the same on every rank

torch keeps the part that a DTensor has: an assignment to its `.data` changes what it says of itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import InputError
from autopar.torch_seams.dtensors import part_of, take_over, with_part
from autopar.trace.call.user_source import calling_line

_PROPERTIES: dict[str, Any] = {name: getattr(Tensor, name) for name in ("data", "grad")}
_NAMES = {id(described): name for name, described in _PROPERTIES.items()}


def assigned(function: Callable[..., Any]) -> str | None:
    """The name of the property that `function` sets, if it is one of those here."""
    return _NAMES.get(id(getattr(function, "__self__", None))) if function.__name__ == "__set__" else None


@torch.no_grad()
def assign(name: str, owner: DTensor, value: Tensor) -> None:
    """Assign `value` as the `data` or `grad` of a parameter, laid as that one is.

    Raises InputError for another shape, or another dtype of a gradient.
    """
    if value.shape != owner.shape or (name == "grad" and value.dtype != owner.dtype):
        raise InputError(
            where=calling_line(),
            found=f"{value.dtype} of shape {tuple(value.shape)} as .{name} of a parameter",
            wanted=f"{owner.dtype} of shape {tuple(owner.shape)}, which the plan is for",
            remedy="pass a tensor like the parameter, or change the model before parallelize",
        )
    if name == "grad" and isinstance(value, DTensor) and value.placements == owner.placements:
        _PROPERTIES[name].__set__(owner, value)
        return
    alike = _laid_as(owner, value)
    _PROPERTIES[name].__set__(owner, alike)
    if name == "data":
        take_over(owner, alike)


def _laid_as(owner: DTensor, value: Tensor) -> DTensor:
    """`value` as a DTensor that lies as `owner` does, in the same memory where it does already."""
    mesh = owner.device_mesh
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    if value.placements != owner.placements:
        value = value.redistribute(placements=owner.placements)
    mine = part_of(value).detach()
    if not mine.is_contiguous() or mine.untyped_storage().nbytes() > mine.nbytes:  # a part of the whole
        mine = mine.clone(memory_format=torch.contiguous_format)
    return with_part(mine, value)
