"""How the parameters and buffers of a module are stored, and its state dicts in serial order.

state_dict         DTensors of this rank  --gather-->  full tensors in serial order
load_state_dict    full tensors  --the user's own hooks-->  --cut-->  this rank's parts, in place

A rank's part may be rows that lie apart in the serial tensor: heads of q, k and v. Its DTensor holds them
side by side, in the place of a chunk. Where sharded state dicts are asked for, a DTensor's local part is a
chunk of the serial tensor. So that the two are never taken for each other, those are on a mesh of their own,
of the same ranks and other names: torch refuses to mix them.

    serial, 4 rows    q0 q1 k0 k1
    stored            rank 0: q0 k0   rank 1: q1 k1      mesh axes a, b, c
    in serial order   rank 0: q0 q1   rank 1: k0 k1      mesh axes serial_a, serial_b, serial_c
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar.core.part import Part
from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.executable import InputPart
from autopar.runtime.parameters.parameters import distribute, gather, local, placements_of
from autopar.torch_seams.dtensors import compute_local_shape_and_global_offset, with_part
from autopar.torch_seams.modules import (
    add_loading_hook,
    add_saving_hook,
    own_buffers,
    own_parameters,
    saving_hooks_of,
    unsaved_buffers,
)

_sharded: ContextVar[bool] = ContextVar("state dicts of this rank's chunks", default=False)


@contextmanager
def sharded_state(is_sharded: bool) -> Iterator[None]:
    """Context in which state dicts hold DTensors in serial order instead of full tensors, or full ones
    again."""
    token = _sharded.set(is_sharded)
    try:
        yield
    finally:
        _sharded.reset(token)


def is_sharded_state() -> bool:
    """Whether state dicts at the moment hold DTensors in serial order."""
    return _sharded.get()


@dataclass(frozen=True, slots=True)
class SerialOrder:
    """A rank's chunk of a serial tensor on a mesh, and whether it is stored apart from that."""

    chunk: InputPart
    mesh: DeviceMesh
    is_apart: bool  # on some rank


def chunk_of(part: InputPart, mesh: DeviceMesh) -> InputPart:
    """The chunk that a DTensor laid like `part` holds of the serial tensor, as torch computes it."""
    shape = part.spec.shape
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements_of(part.layout))
    rows = tuple(((start, start + size),) for start, size in zip(offsets, sizes, strict=True))
    return replace(part, part=Part(tuple((size,) for size in shape), rows))


def out_of_order(parts: Mapping[str, InputPart], mesh: DeviceMesh, device: torch.device) -> set[str]:
    """The names of what isn't in serial order on some rank; a collective of all ranks."""
    apart = torch.tensor([not is_in_serial_order(part, mesh) for part in parts.values()], dtype=torch.int32)
    apart = apart.to(device)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return {name for name, is_apart in zip(parts, apart.tolist(), strict=True) if is_apart}


def is_in_serial_order(part: InputPart, mesh: DeviceMesh) -> bool:
    """Whether this rank's part is the chunk that its DTensor stands for."""
    chunk = chunk_of(part, mesh).part
    return all(part.part.lies_in(dim, chunk.span(dim)) for dim in range(len(part.spec.shape)))


@dataclass(frozen=True, slots=True)
class Stored:
    """Storage of a module's tensor: its part, and the key that gathers it.

    With pipeline stages only some ranks hold it: `holder` is the rank of the world that the others get it
    from, None if all hold it.
    """

    part: InputPart
    key: str | None
    device: torch.device
    serial: SerialOrder
    holder: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether gathering the tensor is a collective."""
        return self.key is not None or self.holder is not None

    def gather(self, tensor: Tensor | None) -> Tensor:
        """The full tensor, in serial order, on all ranks; a collective. None where it is not held."""
        full = None if tensor is None else gather(tensor, self.part, self.key)
        if self.holder is None:
            assert full is not None
            return full
        dtype = [None if full is None else full.dtype]  # it may have been changed where it is held
        dist.broadcast_object_list(dtype, src=self.holder, device=self.device)
        if full is None:
            full = torch.empty(self.part.spec.shape, dtype=dtype[0], device=self.device)
        dist.broadcast(full.contiguous(), src=self.holder)
        return full

    def in_serial_order(self, tensor: DTensor) -> DTensor:
        """The DTensor that holds a chunk of the serial tensor; a collective where it is stored apart."""
        if not self.serial.is_apart:
            return distribute(self.part, local(tensor).detach(), self.serial.mesh)
        full = gather(tensor, self.part, self.key)
        return distribute(self.serial.chunk, _copy(self.serial.chunk.part.take(full)), self.serial.mesh)

    def from_serial_order(self, value: DTensor, mesh: DeviceMesh) -> DTensor:
        """The rank's part of a tensor that is in serial order; a collective where it is stored apart."""
        if value.placements != placements_of(self.part.layout):
            return self.cut(value.full_tensor(), mesh)
        if not self.serial.is_apart:
            return distribute(self.part, local(value).detach().to(self.device), mesh)
        return self.cut(gather(local(value).to(self.device), self.serial.chunk, self.key), mesh)

    def cut(self, full: Tensor, mesh: DeviceMesh) -> DTensor:
        """Copy the rank's part of a full tensor."""
        return distribute(self.part, _copy(self.part.part.take(full.detach())).to(self.device), mesh)


class FullState:
    """The hooks by which the state dicts of one module hold full tensors, by the names in it."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored
        self._live = False

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks, so that users' own see full tensors: first after saving, last for loading."""
        others = dict(saving_hooks_of(module))
        saving_hooks_of(module).clear()
        after = add_saving_hook(module, self._after_saving)
        saving_hooks_of(module).update(others)
        return [
            module.register_state_dict_pre_hook(self._before_saving),
            after,
            add_loading_hook(module, self._before_loading, with_module=True),
        ]

    def _before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._live = keep_vars

    def _after_saving(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put full tensors in the place of parts, or chunks in serial order: a collective over the ranks that
        share them.

        With `keep_vars` the parameters themselves are given, which are DTensors.
        """
        if self._live:
            return
        saved = {name: item for name, item in self.stored.items() if name not in unsaved_buffers(module)}
        if is_sharded_state():
            for name, stored in saved.items():
                if isinstance(held := state.get(prefix + name), DTensor):
                    state[prefix + name] = stored.in_serial_order(held)
            return
        shared = any(stored.is_shared for stored in saved.values())
        with collective("state_dict") if shared else nullcontext():
            for name, stored in saved.items():
                state[prefix + name] = stored.gather(state.get(prefix + name))

    def _before_loading(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Cut full tensors to this rank's parts, which is a collective for those in chunks."""
        for name, stored in self.stored.items():
            value = state.get(prefix + name)
            held = own_parameters(module).get(name, own_buffers(module).get(name))
            if held is None:
                state.pop(prefix + name, None)  # another stage's
            elif isinstance(value, Tensor) and (isinstance(held, DTensor) or isinstance(value, DTensor)):
                state[prefix + name] = _taken(value, stored, held, prefix + name)


def _taken(value: Tensor, stored: Stored, held: Tensor, name: str) -> Tensor:
    """Part of a loaded value for this rank. A value of another shape is returned as it is, for nn.Module to
    refuse."""
    if isinstance(value, DTensor):
        check_mesh(value, stored, held, name)
    if tuple(value.shape) != stored.part.spec.shape:
        return value
    if not isinstance(held, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        is_serial = value.device_mesh == stored.serial.mesh
        return stored.from_serial_order(value, held.device_mesh) if is_serial else value
    mine = stored.part.part.take(value.detach()).to(local(held)).contiguous()
    with torch.no_grad():
        return with_part(mine, held)


def check_mesh(value: DTensor, stored: Stored, held: Tensor, name: str) -> None:
    """Raise InputError for a DTensor that another plan or another library has laid."""
    own = held.device_mesh if isinstance(held, DTensor) else stored.serial.mesh
    if value.device_mesh not in (own, stored.serial.mesh):
        raise InputError(
            where=f"loading {name}",
            found=f"a DTensor of another mesh, of {' x '.join(map(str, value.device_mesh.shape))} devices",
            wanted="a full tensor, or a chunk by this plan",
            remedy="save state_dict(), called on all ranks, or use torch.distributed.checkpoint with "
            "get_state_dict and set_state_dict",
        )


def _copy(values: Tensor) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format)
