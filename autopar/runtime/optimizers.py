"""Optimizers on sharded parameters: the slow way round is avoided, the impossible refused by name.

Element-wise optimizers (SGD, Adam, AdamW and the like) compute on DTensors what they compute on the
full tensors, and torch itself refuses those of its own that it cannot split. What is left are
optimizers that take a whole matrix as one thing, and that run on shards with another result.

Each operation on a DTensor costs some 50 us of Python beside the arithmetic, one on a list of them
13 us for each: where the user leaves the choice to torch, steps work on lists (`foreach`), as torch
itself chooses on GPUs.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InputError

_LISTED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_WHOLE_TENSOR = ("Muon",)  # orthogonalises each matrix, in bfloat16, whose sums depend on the shards


def refuse_whole_tensor(owner: object, mesh: DeviceMesh) -> None:
    """From now on, while `owner` lives, such an optimizer's step on shards of `mesh` raises InputError."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _WHOLE_TENSOR]
        if kinds and any(
            _is_sharded(item, mesh) for group in optimizer.param_groups for item in group["params"]
        ):
            raise InputError(
                where=f"optimizer {type(optimizer).__name__}",
                found="parameters that are sharded",
                wanted=f"whole ones: {kinds[0]} treats each matrix as one",
                remedy='use an element-wise optimizer, or plan with force="batch"',
            )

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(owner, handle.remove)


def work_on_lists(owner: object, mesh: DeviceMesh) -> None:
    """While `owner` lives, groups of parameters on `mesh` whose `foreach` is None take it."""

    def choose(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not isinstance(optimizer, _LISTED):
            return
        for group in optimizer.param_groups:
            free = group["foreach"] is None and not group["fused"] and not group["differentiable"]
            if free and all(
                isinstance(item, DTensor) and item.device_mesh == mesh for item in group["params"]
            ):
                group["foreach"] = True

    handle = register_optimizer_step_pre_hook(choose)
    weakref.finalize(owner, handle.remove)


def _is_sharded(parameter: Any, mesh: DeviceMesh) -> bool:
    return (
        isinstance(parameter, DTensor)
        and parameter.device_mesh == mesh
        and any(placement.is_shard() for placement in parameter.placements)
    )
