"""States that are handed on from row to row, as one operator of a graph: `autopar.scan`.

    h_t = a_t h_{t-1} + b_t        h_{-1} = 0        scan(a, b, dim)

In log2 of the length passes, each of which joins a row with the one so many rows before it:

    rows          b0        b1             b2               b3
    1 before      b0     a1 b0 + b1     a2 b1 + b2       a3 b2 + b3        and a1 a0, a2 a1, a3 a2
    2 before      h0        h1             h2               h3

Backward is a scan from the last row: g_t = dh_t + a_{t+1} g_{t+1}, with g the gradient of b, and g_t h_{t-1}
that of a. Source: Hillis and Steele, 1986; Martin and Cundy, 2018.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError

_custom_op: Any = torch.library.custom_op  # ships without types


def scan(decay: Tensor, update: Tensor, dim: int = 1) -> Tensor:
    """The states h_t = decay_t h_{t-1} + update_t along a dim, from h_{-1} = 0.

    Decay and update are broadcast to one shape. A plan may split the dim: each rank hands its last state on.
    Raises InputError for tensors without such a dim, of other numbers than floats, or of two dtypes.
    """
    wrong = _fault(decay, update, dim)
    if wrong:
        found, wanted = wrong
        raise InputError(where="autopar.scan", found=found, wanted=wanted, remedy="change the call")
    decay, update = torch.broadcast_tensors(decay, update)
    states: Tensor = SCAN(decay, update, dim % update.dim())
    return states


def _fault(decay: Tensor, update: Tensor, dim: int) -> tuple[str, str] | None:
    """What is wrong with a call, and what is wanted."""
    if decay.dtype != update.dtype or not update.dtype.is_floating_point:
        return f"a decay of {decay.dtype}, an update of {update.dtype}", "floats of one dtype"
    try:
        rank = len(torch.broadcast_shapes(decay.shape, update.shape))
    except RuntimeError:
        return f"a decay of {list(decay.shape)}, an update of {list(update.shape)}", "shapes that broadcast"
    return None if -rank <= dim < rank else (f"dim {dim} of {rank}", "a dim of the tensors")


def _run(decay: Tensor, update: Tensor, dim: int) -> Tensor:
    a, h, length, step = decay.movedim(dim, 0), update.movedim(dim, 0).clone(), update.shape[dim], 1
    while step < length:
        h = torch.cat([h[:step], torch.addcmul(h[step:], a[step:], h[:-step])])
        a = torch.cat([a[:step], a[step:] * a[:-step]])
        step *= 2
    return h.movedim(0, dim).contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    decay, _, ctx.dim = inputs
    ctx.save_for_backward(decay, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    decay, states = ctx.saved_tensors
    dim = ctx.dim
    after = torch.cat([decay.narrow(dim, 1, decay.shape[dim] - 1), _row(decay, dim)], dim)
    slope = SCAN(after.flip(dim), gradient.flip(dim), dim).flip(dim)
    before = torch.cat([_row(states, dim), states.narrow(dim, 0, states.shape[dim] - 1)], dim)
    return slope * before, slope, None


def _row(x: Tensor, dim: int) -> Tensor:
    """A row of zeros."""
    return torch.zeros_like(x.narrow(dim, 0, 1))


_scan = _custom_op(
    "autopar_scans::linear", _run, mutates_args=(), schema="(Tensor decay, Tensor update, int dim) -> Tensor"
)
_scan.register_fake(
    lambda decay, update, dim: torch.empty_like(update, memory_format=torch.contiguous_format)
)
_scan.register_autograd(_backward, setup_context=_save)
SCAN: Any = torch.ops.autopar_scans.linear.default
