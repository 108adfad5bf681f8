"""Fetches of weights from the host's memory, and gradients' ways back, in halves between which work runs.

    forward    start 1   op 0   wait 1   start 2   op 1
    backward   op 1   start 1'   op 0   wait 1'           what starts is a gradient's way back

They are halves as those of gathers are (started_moves.py): the backward of a wait is the start of the copy
the other way, that of a start its wait. They need no other rank: where something raises between the halves,
the copy is over when its handle is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import registry
from autopar.runtime.collectives.started_moves import START, WAIT, begin, end
from autopar.runtime.saved import regather
from autopar.runtime.saved.copies import StartedCopy
from autopar.runtime.saved.host_weights import FETCH, GIVE_BACK, room_on_device, room_on_host

FETCH_AHEAD = FETCH + regather.REGATHER  # the fetch that programs start ahead
_STARTS = "(Tensor x, Device device) -> Tensor"
_WAITS = "(Tensor handle, Tensor like, Device device) -> Tensor"
Room = Callable[[Tensor, torch.device], Tensor]


def begins_copy(target: Any) -> bool:
    """Whether an operator begins one of these copies."""
    return any(target is registry.operator(START + name) for name in (FETCH, FETCH_AHEAD, GIVE_BACK))


def _handle(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=x.dtype, device="cpu")


def _halves(name: str, transposed: str, room: Room, shape: Room) -> None:
    """Register both halves of a copy into memory that `room` makes, of a `shape` like its source's."""

    def begin_kernel(x: Tensor, device: torch.device) -> Tensor:
        copy = StartedCopy(room(x, device), x.detach(), device)
        return begin(_handle(x, device), copy, is_local=True)

    def end_kernel(handle: Tensor, like: Tensor, device: torch.device) -> Tensor:
        copy: Tensor = end(handle)
        if name == FETCH_AHEAD:
            regather.note(copy, FETCH, like, (device,), is_ahead=True)
        return copy

    def keep_source(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.shape, ctx.device = inputs[0].shape, inputs[1]

    def end_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        like = gradient.new_empty(()).expand(ctx.shape)
        return registry.operator(WAIT + transposed)(gradient, like, ctx.device), None

    def keep_device(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.device = inputs[2]

    def begin_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return registry.operator(START + transposed)(gradient, ctx.device), None, None

    def like_shape(handle: Tensor, like: Tensor, device: torch.device) -> Tensor:
        return shape(like, device)

    register = partial(registry.functional, is_local=True)
    register(START + name, _STARTS, begin_kernel, shape=_handle, setup=keep_source, backward=end_back)
    register(WAIT + name, _WAITS, end_kernel, shape=like_shape, setup=keep_device, backward=begin_back)


def _on_host(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


for _name in (FETCH, FETCH_AHEAD):
    _halves(_name, GIVE_BACK, room_on_device, room_on_device)
_halves(GIVE_BACK, FETCH, room_on_host, _on_host)
