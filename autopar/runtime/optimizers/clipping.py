"""Gradient clipping over stages: one norm over all parameters, wherever they are.

torch's own clipping sees the parameters of one pipeline rank, and would scale each stage by a norm of
its own, in silence. So on parameters of a pipeline it is refused.

    norm = (sum over pipeline ranks of  sum over their own parameters of  |g|^p) ^ (1/p)

A tied weight is counted by the first rank that holds it; what is sharded is summed over its mesh.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.collectives import transport
from autopar.torch_seams.dtensors import part_of
from autopar.torch_seams.optimizers import total_norms

_staged: list[weakref.ref[DeviceMesh]] = []


def total_norm(
    gradients: Iterable[Tensor],
    norm_type: float,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """The norm of this rank's `gradients` and those of the other ranks of `group`, a scalar of `dtype`.

    Without `group` it is that of the gradients alone. Collective.
    """
    norms = [_whole(torch.linalg.vector_norm(item, norm_type)) for item in gradients]
    own = torch.stack(norms) if norms else torch.zeros(0, device=device)
    own = own.to(torch.float64)
    if math.isinf(norm_type):  # the largest norm, or of -inf the least
        sign = math.copysign(1.0, norm_type)
        most = (own * sign).amax() if norms else own.new_tensor(min(0.0, sign * math.inf))
        if group is not None:
            transport.all_reduce(most, group, dist.ReduceOp.MAX)
        return (most * sign).to(dtype)
    powers = (own != 0).sum().to(own.dtype) if norm_type == 0 else own.pow(norm_type).sum()
    if group is not None:
        transport.all_reduce(powers, group)
    return (powers if norm_type == 0 else powers.pow(1 / norm_type)).to(dtype)


def norm_over_meshes(
    gradients: Iterable[Tensor], norm_type: float, *, dtype: torch.dtype, device: torch.device, leads: bool
) -> Tensor:
    """The norm of all ranks' gradients where stages have meshes of their own: the first rank of each mesh,
    which `leads`, tells that of its stage. Collective."""
    if norm_type == 0:
        raise InputError(
            where="clip_grad_norm_",
            found="the norm of 0, with stages on unlike meshes",
            wanted="another norm",
            remedy="choose the norm of 2, say",
        )
    own = total_norm(gradients, norm_type, dtype=torch.float64, group=None, device=device)
    return total_norm([own] if leads else [], norm_type, dtype=dtype, group=dist.group.WORLD, device=device)


def norm_dtype(learning: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype of the norm over parameters of these dtypes, as torch promotes them: the same on all ranks,
    also where none of the parameters is."""
    reals = [dtype.to_real() for dtype in learning]
    return functools.reduce(torch.promote_types, reals) if reals else torch.get_default_dtype()


def scale(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place so that their norm is at most `max_norm`, by torch's own formula."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for item in gradients:
        local: Tensor = part_of(item) if isinstance(item, DTensor) else item
        local.mul_(factor.to(local.dtype))


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor().detach() if isinstance(norm, DTensor) else norm.detach()


# -- torch's own ----------------------------------------------------------------------------------


def refuse_torch_clipping(mesh: DeviceMesh) -> None:
    """Make torch's clipping of parameters on `mesh`, which is one stage's, raise InputError from now on."""
    _staged[:] = [each for each in _staged if each() is not None] + [weakref.ref(mesh)]
    for norm in total_norms:
        norm.wrap(_guard)


def _guard(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        meshes = [each() for each in _staged]
        if any(
            isinstance(item, DTensor) and any(item.device_mesh is mesh for mesh in meshes) for item in given
        ):
            raise InputError(
                where="torch.nn.utils.clip_grad_norm_",
                found="parameters of one stage of a pipeline, each with a norm of its own",
                wanted="one norm over all stages",
                remedy="call clip_grad_norm_ of the parallel module",
            )
        return function(given, *args, **kwargs)

    return guarded
