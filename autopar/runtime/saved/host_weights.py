"""Weights that lie in the host's memory, with their gradients and the optimizer's state.

    host       w0     w1     w2            w2.grad       w1.grad       w0.grad     the optimizer steps here
    copies      v      v      v            v    ^        v    ^        v    ^
    device     [w0]   [w1]   [w2]   ...   [w2, its grad][w1, its grad][w0, its grad]

A fetch is a gather over no axis: `fetch_regather` copies a weight to the device at its first use, and of what
autograd saves the copy is replaced by the way to make it anew (regather.py). What it passes back is
`give_back`, which copies a gradient to the host. Both come in halves, too, between which something is
computed (collectives/started_fetches.py). On a GPU the host's memory is pinned, and its thread waits for each
copy where it is needed: so nothing on the host is read before it is there, or written while it is read. On a
CPU copies are made into storages that are known as the host's, and from these into plain ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.runtime import registry
from autopar.runtime.saved import regather
from autopar.runtime.saved.offload import HostStorage

FETCH, GIVE_BACK = regather.FETCH, "give_back"
_SCHEMA = "(Tensor x, Device device) -> Tensor"


def in_host_memory(values: Tensor, device: torch.device) -> Tensor:
    """A contiguous copy in the memory of the host of a device."""
    with torch.no_grad():
        return _to_host(values, device)


def fetch_target() -> Any:
    """The operator that programs call."""
    return registry.operator(FETCH + regather.REGATHER)


def room_on_host(x: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy of `x`, contiguous, in that of the host of a device."""
    if device.type != "cpu":
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    storage = HostStorage(x.numel() * x.element_size())  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=x.dtype).set_(storage).view(x.shape)


def room_on_device(x: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy of `x`, contiguous, on a device."""
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def is_fetch(node: fx.Node) -> bool:
    """Whether a call of a program brings a weight from the host, or waits for one."""
    names = FETCH + regather.REGATHER, f"wait_{FETCH}{regather.REGATHER}"
    return node.op == "call_function" and node.target in map(registry.operator, names)


def _to_host(x: Tensor, device: torch.device) -> Tensor:
    return room_on_host(x, device).copy_(x)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return room_on_device(x, device).copy_(x)


def _to_device_anew(x: Tensor, device: torch.device) -> Tensor:
    full = _to_device(x, device)
    regather.note(full, FETCH, x, (device,), is_ahead=False)
    return full


def _keep_device(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
    ctx.device = inputs[1]


def _back(name: str) -> Any:
    """The backward that copies a gradient the other way, by the operator `name`."""

    def back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return registry.operator(name)(gradient, ctx.device), None

    return back


def _home(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


for _name, _kernel in ((FETCH, _to_device), (FETCH + regather.REGATHER, _to_device_anew)):
    registry.functional(
        _name,
        _SCHEMA,
        _kernel,
        shape=room_on_device,
        setup=_keep_device,
        backward=_back(GIVE_BACK),
        is_local=True,
    )
registry.functional(
    GIVE_BACK, _SCHEMA, _to_host, shape=_home, setup=_keep_device, backward=_back(FETCH), is_local=True
)
