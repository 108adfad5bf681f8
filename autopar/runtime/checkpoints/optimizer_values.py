"""One value of an optimizer's state, between how it lies on a rank and serial order.

What is shaped as its parameter lies as that does, whether it is a DTensor or the rank's own part as a plain
tensor. A number is the same on all ranks. Rows and columns of a factored moment run as the parameter's parts
do (factored_moments.py), or in serial order on the mesh of that name. Anything else (blocks of a quantized
one) can be told only where torch knows how it lies and all parameters are stored in serial order; the rest is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autopar.errors import InputError
from autopar.runtime.optimizers.factored_moments import to_parts, to_serial
from autopar.runtime.parameters.parameters import distribute, local
from autopar.runtime.tree.stored import Stored, check_mesh


class Subject(NamedTuple):
    """Subject of a state's value: a parameter, its storage, and both their names.

    `beside_apart` says that some parameter of the optimizer isn't stored in serial order: values of other
    shapes may be made of several.
    """

    parameter: DTensor
    stored: Stored
    name: str
    state: str
    beside_apart: bool

    @property
    def is_sharded(self) -> bool:
        """Whether the parameter is sharded."""
        return self.stored.key is not None


def mapped(value: Any, template: Any, change: Callable[[Tensor, Tensor | None], Any]) -> Any:
    """`value` with its tensors changed, wherever it holds them; `template` is another such value, or None."""
    match value:
        case Tensor():
            return change(value, template if isinstance(template, Tensor) else None)
        case dict():
            others = template if isinstance(template, dict) else {}
            return {key: mapped(item, others.get(key), change) for key, item in value.items()}
        case list() | tuple():
            same = isinstance(template, (list, tuple)) and len(template) == len(value)
            partners = template if same else [None] * len(value)
            return type(value)(
                [mapped(item, other, change) for item, other in zip(value, partners, strict=True)]
            )
    return value


# -- saving -------------------------------------------------------------------------------------


def part_of_parameter(value: Tensor, subject: Subject) -> DTensor | None:
    """The value as a DTensor that lies as the parameter does, if it is such a part."""
    parameter = subject.parameter
    if not parameter.dim():
        return None
    if isinstance(value, DTensor):
        if value.shape != parameter.shape or value.device_mesh != parameter.device_mesh:
            return None
        return (
            value
            if value.placements == parameter.placements
            else value.redistribute(placements=parameter.placements)
        )
    is_part = subject.is_sharded and value.shape == local(parameter).shape != parameter.shape
    return distribute(subject.stored.part, value.detach(), parameter.device_mesh) if is_part else None


def whole(value: Tensor, subject: Subject) -> Tensor:
    """The serial value of what isn't shaped as the parameter, or not by parts; a collective for DTensors.

    Raises InputError where that can't be told.
    """
    is_number = not value.dim() or (value.numel() == 1 and not isinstance(value, DTensor))
    is_laid = isinstance(value, DTensor) or value.shape == subject.parameter.shape
    if isinstance(value, DTensor) and value.device_mesh == subject.stored.serial.mesh:
        return value.full_tensor().detach()
    if not is_number and isinstance(value, DTensor) and value.device_mesh == subject.parameter.device_mesh:
        moment = to_serial(value, subject.parameter, subject.stored)
        if moment is not None:
            return moment
    can_tell = not subject.beside_apart and (is_laid or not subject.is_sharded)
    if not is_number and not can_tell:
        raise _unknown(value, subject)
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def saved(value: Tensor, _: Tensor | None, *, subject: Subject, sharded: bool) -> Tensor:
    """The value in serial order: full, or the rank's chunk; a collective of those that hold the parameter."""
    part = part_of_parameter(value, subject)
    if part is None:
        return whole(value, subject)
    return subject.stored.in_serial_order(part) if sharded else subject.stored.gather(part)


def _unknown(value: Tensor, subject: Subject) -> InputError:
    return InputError(
        where=f"{subject.state} of {subject.name} in an optimizer's state",
        found=f"shape {tuple(value.shape)}, for a parameter of shape "
        f"{tuple(subject.parameter.shape)} in shards",
        wanted="numbers, or tensors of the parameter's shape: how others are cut can't be told",
        remedy='use Adam, AdamW or SGD, or plan with force="batch" and shard_state="none"',
    )


# -- loading ------------------------------------------------------------------------------------


def loaded(value: Tensor, template: Tensor | None, *, subject: Subject) -> Tensor:
    """The rank's part of a value in serial order, a copy that lies as the optimizer's own there, if any.

    A collective for chunks of what is stored apart.
    """
    parameter, stored = subject.parameter, subject.stored
    if isinstance(value, DTensor):
        check_mesh(value, stored, parameter, f"{subject.state} of {subject.name}")
    if not value.dim():
        return _number(value, template, subject)
    if value.shape != parameter.shape:
        return _of_other_shape(value, template, subject)
    if template is not None and not isinstance(template, DTensor) and template.shape == parameter.shape:
        return value.full_tensor() if isinstance(value, DTensor) else value.clone()
    part: Any
    if not isinstance(value, DTensor):
        part = stored.cut(value, parameter.device_mesh)
    elif value.device_mesh == stored.serial.mesh:
        part = stored.from_serial_order(value, parameter.device_mesh).clone()
    else:
        part = value.redistribute(placements=parameter.placements).clone()
    return part if template is None or isinstance(template, DTensor) else local(part)


def _number(value: Tensor, template: Tensor | None, subject: Subject) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    is_moment = template is None and not subject.parameter.dim() and subject.state != "step"
    if is_moment or isinstance(template, DTensor):
        mesh = subject.parameter.device_mesh
        value = value.to(local(subject.parameter).device)
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value


def _of_other_shape(value: Tensor, template: Tensor | None, subject: Subject) -> Tensor:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if template is not None and template.shape == value.shape:
        return _like(template, value, subject) if isinstance(template, DTensor) else value.clone()
    if template is None and value.numel() == 1:
        return value.clone()
    moment = to_parts(value, subject.parameter, subject.stored) if template is None else None
    if moment is None and (template is not None or subject.is_sharded):
        raise _unlike(value, subject)
    mesh, mine = subject.parameter.device_mesh, value if moment is None else moment
    mine = mine.to(local(subject.parameter).device).clone()
    return DTensor.from_local(mine, mesh, value_placements(mesh.ndim), run_check=False)


def _like(template: DTensor, value: Tensor, subject: Subject) -> Tensor:
    """The serial value as the optimizer's own lies."""
    mesh = template.device_mesh
    moment = (
        None if mesh == subject.stored.serial.mesh else to_parts(value, subject.parameter, subject.stored)
    )
    if moment is None and template.placements != value_placements(mesh.ndim) and subject.beside_apart:
        raise _unlike(value, subject)
    moved = (value if moment is None else moment).to(local(subject.parameter).device)
    return distribute_tensor(moved, mesh, template.placements, src_data_rank=None).clone()


def value_placements(ndim: int) -> tuple[Replicate, ...]:
    """The placements of a tensor that every rank has whole."""
    return (Replicate(),) * ndim


def _unlike(value: Tensor, subject: Subject) -> InputError:
    return InputError(
        where=f"loading {subject.state} of {subject.name} into an optimizer",
        found=f"shape {tuple(value.shape)} for a parameter of shape {tuple(subject.parameter.shape)}",
        wanted="the state of this model's optimizer: numbers, or tensors of the parameter's shape",
        remedy="load what an optimizer of the same parameters in the same order has given; other shapes by "
        "set_optimizer_state_dict",
    )
