"""Steps of optimizers that DTensors can't take: on whole parameters, or on this rank's parts.

Muon, Adafactor        one parameter after the other: gathered, stepped, cut to this rank's part again
Rprop, fused Adagrad   element by element: on this rank's part

    pre-hook    for each parameter:  state -> stand-in -> the optimizer's own step -> state
    step        finds no gradients left
    post-hook   gradients are back

A gathered parameter takes its memory, its gradient's and its state's for the time of its own step alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.optimizers.factored_moments import to_serial
from autopar.runtime.optimizers.optimizers import TreeOwner, at_steps
from autopar.runtime.parameters.parameters import distribute, gather, local
from autopar.runtime.tree.stored import Stored

_WHOLE = {"Muon", "Adafactor"}  # orthogonalise a matrix, or take norms of all, of its rows and columns
_PARTS = {"Rprop"}  # selects elements by their signs
_FUSED_PARTS = {"Adagrad"}  # whose kernel DTensor doesn't know


def step_whole(owner: TreeOwner, mesh: DeviceMesh, *, staged: bool) -> None:
    """While `owner` lives, let such optimizers step its parameters on `mesh`; collective unless `staged`,
    since then not all ranks have parameters."""
    hidden: list[tuple[DTensor, Any]] = []
    running: set[int] = set()
    alive = weakref.ref(owner)  # torch's list of hooks would keep it

    def step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        if id(optimizer) in running or not (kinds & (_WHOLE | _PARTS | _FUSED_PARTS)):
            return None
        if not kinds & (_WHOLE | _PARTS) and not any(group["fused"] for group in optimizer.param_groups):
            return None
        if (owner := alive()) is None:
            return None
        args, kwargs = _called(args, kwargs)
        stored = {key: item.stored for key, item in owner.tree.owned().items()}
        mine = [
            (group, item)
            for group in optimizer.param_groups
            for item in group["params"]
            if id(item) in stored and item.grad is not None
        ]
        shared = not staged and any(stored[id(item)].is_shared for _, item in mine)
        running.add(id(optimizer))
        try:
            with collective(f"step of {type(optimizer).__name__}") if shared else nullcontext():
                for group, item in mine:
                    _step_one(optimizer, group, item, stored[id(item)], mesh, whole=bool(kinds & _WHOLE))
        finally:
            running.discard(id(optimizer))
        for _, item in mine:
            hidden.append((item, item.grad))
            item.grad = None
        return args, kwargs

    def restore(*_: Any) -> None:
        while hidden:
            item, gradient = hidden.pop()
            item.grad = gradient

    at_steps(register_optimizer_step_pre_hook, owner, step)
    at_steps(register_optimizer_step_post_hook, owner, restore)


def _called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the step, with the closure's loss in the place of a closure, which makes gradients."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss), {}


@torch.no_grad()
def _step_one(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    item: Any,
    stored: Stored,
    mesh: DeviceMesh,
    *,
    whole: bool,
) -> None:
    """Step one parameter, by a plain one in its place."""
    gathers = whole and stored.key is not None

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != item.shape or not gathers:
            return _whole(value, item, stored) if isinstance(value, DTensor) else value
        return gather(value.detach(), stored.part, stored.key)

    stand_in = nn.Parameter(plain(item.detach()), item.requires_grad)
    stand_in.grad = plain(item.grad)
    state = optimizer.state.pop(item, {})
    optimizer.state[stand_in] = {name: plain(value) for name, value in state.items()}
    with _alone(optimizer, {**group, "params": [stand_in]}):
        step = type(optimizer).step
        getattr(step, "__wrapped__", step)(optimizer)  # without hooks, which run around the whole step
    if gathers:
        local(item).copy_(stored.part.part.take(stand_in.detach()))
    made = optimizer.state.pop(stand_in, {})
    optimizer.state[item] = {
        name: _laid(value, stand_in, stored, mesh, gathers=gathers) for name, value in made.items()
    }


def _laid(value: Any, stand_in: Tensor, stored: Stored, mesh: DeviceMesh, *, gathers: bool) -> Any:
    """A value of the state as DTensors of the state are laid; numbers as the optimizer has them."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value.shape != stand_in.shape:  # rows or columns in serial order, which all ranks have
        return DTensor.from_local(value, stored.serial.mesh, [Replicate()] * mesh.ndim, run_check=False)
    return stored.cut(value, mesh) if gathers else distribute(stored.part, value, mesh)


def _whole(value: DTensor, item: DTensor, stored: Stored) -> Tensor:
    """Take this rank's part, or rows and columns in serial order, which were loaded as the parts run."""
    if value.shape == item.shape or value.device_mesh != item.device_mesh:
        return local(value)
    moment = to_serial(value, item, stored)
    return local(value) if moment is None else moment


@contextmanager
def _alone(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Iterator[None]:
    """Context in which the optimizer has this group alone."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group]
    try:
        yield
    finally:
        optimizer.param_groups = groups
