"""Loss scaling for float16 over stages: all ranks skip a step, or none.

    loss x scale -> backward -> gradients / scale -> infinite on any rank of any stage? -> no step, on no rank

torch's GradScaler checks the gradients of one optimizer, which are those of one stage; of what is sharded
DTensors ask the whole mesh. So for parameters of a pipeline its answer is the largest over all ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.collectives import transport
from autopar.runtime.collectives.roll_call import collective

_staged: list[weakref.ref[DeviceMesh]] = []
_CHECKS = "_unscale_grads_"  # a method of torch's scaler: it says which gradients are infinite


def factor_of(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor | None:
    """What the scaler multiplies losses by; None if it is not enabled."""
    return scaler.scale(torch.ones((), device=device)) if scaler.is_enabled() else None


def share_infinities(mesh: DeviceMesh) -> None:
    """From now on GradScaler's checks of gradients on `mesh`, one stage's, are those of all ranks."""
    _staged[:] = [each for each in _staged if each() is not None] + [weakref.ref(mesh)]
    check = getattr(torch.amp.GradScaler, _CHECKS)
    if not hasattr(check, "_shared"):
        setattr(torch.amp.GradScaler, _CHECKS, _sharing(check))


def _sharing(check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(check)
    def shared(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = check(scaler, optimizer, *args, **kwargs)
        device = _staged_device(optimizer)
        if device is None:
            return found
        mine = found.get(device, torch.zeros((), device=device))
        with collective("GradScaler.unscale_"):
            assert dist.group.WORLD is not None
            transport.all_reduce(mine, dist.group.WORLD, dist.ReduceOp.MAX)
        return {**found, device: mine}

    shared._shared = True  # type: ignore[attr-defined]
    return shared


def _staged_device(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Where the optimizer's parameters of a stage lie, None if it has none."""
    meshes = [each() for each in _staged]
    for group in optimizer.param_groups:
        for item in group["params"]:
            if isinstance(item, DTensor) and any(item.device_mesh is mesh for mesh in meshes):
                return item.device
    return None
