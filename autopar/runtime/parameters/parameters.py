"""Parameters and buffers between two worlds: DTensors outside, plain local tensors inside.

    optimizer, clipping, checkpoints          the rank's program
    nn.Parameter(DTensor) ----- one storage ----- leaf (plain, requires_grad)
            .grad (DTensor) <-- deliver <-- bucketed sum <-- hook on a bucket's last leaf

Where every rank has all parameters whole, these are plain, and their gradients; one whose gradient needs no
sum is the leaf itself. The program never sees a DTensor. Each program has leaves of its own, so that a
backward through two programs cannot mix a gradient that still has to be summed with one that has been.

A stored shard may be of one atom of a dim (every head of q, k and v). Then the DTensor speaks a
tensor whose rows are permuted: right for optimizers and norms, which don't care, while
`state_dict` speaks the serial tensor, through the rank's `Part`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor.placement_types import Placement as DPlacement

from autopar.core.mesh import AXIS_NAMES, Mesh
from autopar.core.part import Part
from autopar.core.placement import Broadcast, Layout, Partial, Shard, show
from autopar.errors import CheckError, InputError
from autopar.runtime import registry
from autopar.runtime.collectives import groups
from autopar.runtime.collectives.placement_moves import summing_in
from autopar.runtime.executable import InputPart
from autopar.torch_seams.dtensors import part_of, with_part
from autopar.torch_seams.modes import without_subclass_functions

_BACK = {"s_to_b": "p_to_s", "s_to_r": "r_to_s"}  # what a gather does to the gradient


def device_mesh(mesh: Mesh, device: torch.device, *, prefix: str = "") -> DeviceMesh:
    """`mesh` as torch's, on the groups of its single axes (which must be set up); this rank's copy of it.

    Meshes whose axes have other names, by a `prefix`, are unequal: tensors on them don't mix.
    """
    ranks = groups.first_of(mesh) + torch.arange(mesh.num_devices).view(mesh.shape)
    axes = [groups.group(mesh.key((axis,))) for axis in mesh.axes]
    names = tuple(prefix + name for name in AXIS_NAMES[: len(mesh.shape)])
    return DeviceMesh.from_group(axes, device.type, mesh=ranks, mesh_dim_names=names)


def sharding_key(mesh: Mesh, layout: Layout) -> str | None:
    """The key of the groups over which a tensor's parts make up the whole; None if each is whole."""
    axes = [axis for axis, placement in enumerate(layout) if isinstance(placement, Shard)]
    return mesh.key(axes) if axes else None


def plainly() -> AbstractContextManager[Any]:
    """Context in which attributes of DTensors are read as those of tensors are: nine a parameter and step,
    which took half of what a parameter costs beside its operators."""
    return without_subclass_functions()


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter or buffer that this rank holds, sharing its storage."""
    return part_of(tensor) if isinstance(tensor, DTensor) else tensor


def local_buffer(part: InputPart, tensor: Tensor) -> Tensor:
    """The part of a buffer that this rank holds; raises InputError where another tensor took its place."""
    mine = local(tensor)
    if mine.layout is torch.strided and tuple(mine.shape) != part.part.shape:
        raise InputError(
            where=f"buffer {part.target}",
            found=f"a tensor of shape {tuple(mine.shape)} that was put in its place",
            wanted=f"the buffer that parallelize placed, of which this rank has {part.part.shape}",
            remedy="change its values in place, as by buffer.copy_(tensor), or with load_state_dict",
        )
    return mine


def twin_of(tensor: Tensor) -> Tensor:
    """A copy of a parameter or buffer, with the same placement and values and no gradient."""
    values = local(tensor).detach().clone()
    if isinstance(tensor, DTensor):
        values = with_part(values, tensor)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


# -- full tensors to parts and back -------------------------------------------------------------


def distribute(part: InputPart, values: Tensor, mesh: DeviceMesh) -> DTensor:
    """The DTensor whose local part is `values`; raises CheckError where a DTensor cannot say so."""
    wrong = [item for item in part.layout if isinstance(item, (Broadcast, Partial))]
    placements = placements_of(part.layout)
    chunked = _chunked_shape(part, mesh)
    if (wrong and part.spec.requires_grad) or chunked != part.part.shape:
        raise CheckError(
            where=f"{part.target} stored as {show(part.layout)}",
            found=f"local shape {part.part.shape}",
            wanted=f"Shard or Replicate on every axis, and torch.chunk's local shape {chunked}",
            remedy="plan another placement for it and convert at its first use",
        )
    shape = torch.Size(part.spec.shape)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=strides)


def nothing(mesh: DeviceMesh) -> nn.Parameter:
    """A parameter on `mesh` that learns and has no elements; a matrix, as some optimizers take no others."""
    values = torch.empty(0, 0, device=mesh.device_type)
    return nn.Parameter(DTensor.from_local(values, mesh, [DReplicate()] * mesh.ndim, run_check=False))


def placements_of(layout: Layout) -> tuple[DPlacement, ...]:
    """The placements of a layout in torch's terms."""
    return tuple(DShard(item.dim) if isinstance(item, Shard) else DReplicate() for item in layout)


def _chunked_shape(part: InputPart, mesh: DeviceMesh) -> tuple[int, ...]:
    """The local shape that a DTensor of this layout has: chunks of chunks, the major axis first."""
    shape = list(part.spec.shape)
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    for axis, item in enumerate(part.layout):
        if isinstance(item, Shard):
            size = -(-shape[item.dim] // mesh.size(axis))
            left = shape[item.dim] - size * coordinate[axis]
            shape[item.dim] = max(0, min(size, left))
    return tuple(shape)


def gather(tensor: Tensor, part: InputPart, key: str | None) -> Tensor:
    """The full tensor, in serial order, on all ranks: a collective over `key`, or nothing.

    Every rank writes its part into zero bytes, and the bytes are summed, which changes none of them.
    """
    return gather_part(local(tensor).detach(), part.part, part.spec.shape, key)


def gather_part(mine: Tensor, part: Part, shape: Sequence[int], key: str | None) -> Tensor:
    """The full tensor of that shape, of which each rank over `key` has a part; None if each has the whole."""
    if key is None:
        return mine
    full = torch.zeros(*shape, dtype=mine.dtype, device=mine.device)
    part.put(mine, full)
    dist.all_reduce(full.reshape(-1).view(torch.uint8), group=groups.group(key))
    return full


@torch.no_grad()
def gather_once(part: InputPart, shard: Tensor) -> Tensor:
    """The full copy of a parameter that is gathered once a step, without a gradient; collective."""
    full = shard.detach()
    for each in part.gathers:
        full = registry.operator(each.operator)(full, *each.arguments)
    return full


@torch.no_grad()
def scatter_once(part: InputPart, gradient: Tensor) -> Tensor:
    """The shard's gradient from that of the full copy, if the part has one; collective then."""
    for each in reversed(part.gathers):
        dtype = part.reduce if each.operator == "s_to_b" else None
        gradient = summing_in(_BACK[each.operator], dtype)(gradient, *each.arguments)
    return gradient


def add_gradient(outer: Any, total: Tensor) -> None:
    """Add a final local gradient to the `.grad` of an outer parameter.

    What a penalty outside the program left there may be laid otherwise: an expanded number, the same on all
    ranks, or shares of a sum; collective then.
    """
    with plainly():  # what a user assigns gets memory of its own, a total stays where its bucket has it
        add_plainly(outer, total)


def add_plainly(outer: Any, total: Tensor) -> None:
    """Do so within `plainly`."""
    if outer.grad is None:
        outer.grad = _laid_as(outer, total)
    else:
        _add_to(outer, total)


@torch.no_grad()
def _add_to(outer: Any, total: Tensor) -> None:
    before: Any = outer.grad
    if isinstance(outer, DTensor) and before.placements != outer.placements:
        outer.grad = before.redistribute(placements=outer.placements)
    if local(outer.grad).is_contiguous():
        local(outer.grad).add_(total)
    else:  # elements that share memory
        outer.grad = _laid_as(outer, local(outer.grad) + total)


def _laid_as(outer: Tensor, gradient: Tensor) -> Tensor:
    return with_part(gradient, outer) if isinstance(outer, DTensor) else gradient
