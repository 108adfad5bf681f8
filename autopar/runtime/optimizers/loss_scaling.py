"""Loss scaling for float16 over stages: all ranks skip a step, or none.

    loss x scale -> backward -> gradients / scale -> infinite on any rank of any stage? -> no step, on no rank

torch's GradScaler checks the gradients of one optimizer, which are those of one stage; of what is sharded
DTensors ask the whole mesh. So for parameters of a pipeline its answer is the largest over all ranks.

Without a scaler torch steps along whatever gradients there are: then all weights are NaN, and no message
says why. Here such a step is refused, before it changes a weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InputError
from autopar.runtime.collectives import transport
from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.executable import Executable, StagedExecutable
from autopar.runtime.optimizers.optimizers import at_steps
from autopar.runtime.parameters.parameters import local
from autopar.runtime.tree.user_tree import UserTree
from autopar.torch_seams.optimizers import unscaled_gradients

_staged: list[weakref.ref[DeviceMesh]] = []
_scaled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose gradients a scaler has looked at
_FOUND = "found_inf"  # of an optimizer that is told by a scaler whether to step


def factor_of(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor | None:
    """The factor of losses; None if the scaler is not enabled."""
    return scaler.scale(torch.ones((), device=device)) if scaler.is_enabled() else None


def share_infinities(mesh: DeviceMesh) -> None:
    """Make GradScaler's checks of gradients on `mesh`, one stage's, cover all ranks from now on."""
    _staged[:] = [each for each in _staged if each() is not None] + [weakref.ref(mesh)]
    unscaled_gradients.wrap(_sharing)


def _sharing(check: Callable[..., Any]) -> Callable[..., Any]:
    def shared(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = check(scaler, optimizer, *args, **kwargs)
        _scaled.add(optimizer)
        device = _staged_device(optimizer)
        if device is None:
            return found
        mine = found.get(device, torch.zeros((), device=device))
        with collective("GradScaler.unscale_"):
            assert dist.group.WORLD is not None
            transport.all_reduce(mine, dist.group.WORLD, dist.ReduceOp.MAX)
        return {**found, device: mine}

    return shared


def _staged_device(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Where the optimizer's parameters of a stage lie, None if it has none."""
    meshes = [each() for each in _staged]
    for group in optimizer.param_groups:
        for item in group["params"]:
            if isinstance(item, DTensor) and any(item.device_mesh is mesh for mesh in meshes):
                return item.device
    return None


# -- without a scaler ---------------------------------------------------------------------------


def computes_in_half(made: Executable | StagedExecutable) -> bool:
    """Whether a program casts any tensor to float16."""
    stages = (made,) if isinstance(made, Executable) else made.stages
    parts = [part for stage in stages for part in stage.module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]
    return any(torch.float16 in (*node.args, *node.kwargs.values()) for node in nodes)


def refuse_infinite(tree: UserTree, is_half: Callable[[], bool]) -> None:
    """While `tree` lives, a step of its parameters along gradients that aren't finite raises InputError.

    Where it `is_half`, and no scaler has looked at them. Each rank looks at its own parts.
    """
    unscaled_gradients.wrap(_sharing)
    owner = weakref.ref(tree)

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        known = owner()
        if optimizer in _scaled or hasattr(optimizer, _FOUND):
            _scaled.discard(optimizer)
        elif known is not None and is_half():
            stepped = {id(item) for group in optimizer.param_groups for item in group["params"]}
            gradients = {
                name: item.grad
                for name, item in known.root.named_parameters()
                if id(item) in stepped and item.grad is not None
            }
            _require_finite(optimizer, gradients)

    at_steps(register_optimizer_step_pre_hook, tree, check)


def _require_finite(optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> None:
    """Raise InputError where one isn't finite; where all are, the device is waited for once."""
    finite = [local(item).isfinite().all() for item in gradients.values()]
    if not finite or torch.stack(finite).all():
        return
    name = next(name for name, fine in zip(gradients, finite, strict=True) if not fine)
    raise InputError(
        where=f"step of {type(optimizer).__name__}",
        found=f"a gradient of {name} that isn't finite, in a model that computes in float16 without a scaler",
        wanted="finite gradients, or a scaler, which leaves out such steps",
        remedy='use torch.amp.GradScaler, or compute in bfloat16 (dtype="bf16")',
    )
