"""Gathers and scatters in two halves, between which other work runs.

    full = s_to_b(x, ...)        handle = start_s_to_b(x, ...)
                                 ...                                     other operators
                                 full = wait_s_to_b(handle, x, ...)

The handle is a tensor of one element, so that autograd knows both halves. The backward of a wait is the start
of the transposed move, and that of a start its wait: what lies between the halves in forward does so in
backward, the other way round.

    forward     start 1   op 0   wait 1   op 1
    backward    op 1   start 1'   op 0   wait 1'

All ranks start and wait in the order of the program, and what moves in between on one group was started in
that order, too: one communicator, one order. On streams of one machine, which carry one exchange after the
other, a start does all, and a wait nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CheckError
from autopar.runtime import registry
from autopar.runtime.collectives import groups, transport
from autopar.runtime.collectives import placement_moves as moves
from autopar.runtime.saved import regather
from autopar.torch_seams.tensors import storage_key

START, WAIT = "start_", "wait_"  # begin the names of the halves
_SUMMING = ("s_to_b", *("s_to_b" + ending for ending in moves.SUMMED.values()))
HALVED = tuple(  # moves that programs start early
    name + suffix for name in (*_SUMMING, "s_to_r") for suffix in ("", regather.REGATHER)
)
SUMS = {"p_to_r": "r_to_b", "p_to_b": "p_to_b", "r_to_b": "p_to_r"}  # others, with their transposed ones
_under_way: dict[int, Callable[[], Any]] = {}  # by the handle's storage
Arguments = tuple[Any, ...]


def begin(handle: Tensor, finish: Callable[[], Any], *, is_local: bool = False) -> Tensor:
    """Begin a move: `wait` on the handle returns the result of `finish`.

    One that `is_local` is forgotten with its handle, where what raised in between left nobody to wait.
    """
    storage = handle.untyped_storage()
    _under_way[storage_key(storage)] = finish
    if is_local:
        weakref.finalize(storage, _forget, storage_key(storage), finish)
    return handle


def under_way(handle: Tensor) -> Callable[[], Any]:
    """What a move was begun with, which nobody has waited for yet."""
    return _under_way[storage_key(handle.untyped_storage())]


def _forget(key: int, finish: Callable[[], Any]) -> None:
    if _under_way.get(key) is finish:
        del _under_way[key]


def end(handle: Tensor) -> Any:
    """Wait for the exchange under a handle, and return its result; raises CheckError the second time."""
    finish = _under_way.pop(storage_key(handle.untyped_storage()), None)
    if finish is None:
        raise CheckError(
            where="wait of a collective",
            found="one that was not started, or was waited for before",
            wanted="one start and one wait",
            remedy="report this model",
        )
    return finish()


def start_gather(x: Tensor, group: str, dim: int, blocks: int, sizes: Sequence[int]) -> Callable[[], Tensor]:
    """Begin to gather; what is returned waits, and gives the full tensor."""
    x, full = x.contiguous(), moves.empty_full(x, group, dim, blocks, sizes)
    parts = moves.parts_of_full(full, dim, blocks, sizes)
    arrived = transport.start_all_gather(full, parts, moves.in_blocks(x, dim, blocks), group)

    def finish() -> Tensor:
        arrived()
        return full

    return finish


def _start_scatter(
    x: Tensor,
    group: str,
    dim: int,
    blocks: int,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
) -> Callable[[], Tensor]:
    """Begin to sum, in `dtype` if any, and to scatter; doubles are summed as they are."""
    other = x.dtype if dtype is None or x.dtype is torch.float64 else dtype
    given = x.to(other).contiguous()
    added = transport.start_reduce_scatter(given, moves.parts_of_full(given, dim, blocks, sizes), group)
    return lambda: added().flatten(dim, dim + 1).to(x.dtype)


def _start_slice(x: Tensor, *arguments: Any) -> Callable[[], Tensor]:
    mine = moves.own_slice(x, *arguments)
    return lambda: mine


def _start_sum(x: Tensor, group: str) -> Callable[[], Tensor]:
    total = x.clone(memory_format=torch.contiguous_format)
    arrived = transport.start_all_reduce(total, groups.group(group))

    def finish() -> Tensor:
        arrived()
        return total

    return finish


def _start_nothing(x: Tensor, group: str) -> Callable[[], Tensor]:
    return x.detach


def _handle(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(1)


def _half(name: str, transposed: str, start: Callable[..., Callable[[], Tensor]]) -> None:
    """Register both halves of a move from shards, and those of its transposed one. Each follows from its own
    start."""

    def begin_kernel(x: Tensor, *arguments: Any) -> Tensor:
        return begin(_handle(x), start(x, *arguments))

    def end_kernel(handle: Tensor, x: Tensor, *arguments: Any) -> Tensor:
        full: Tensor = end(handle)
        if name.endswith(regather.REGATHER):
            regather.note(full, name.removesuffix(regather.REGATHER), x, arguments)
        return full

    def keep_arguments(ctx: Any, inputs: Arguments, _: Tensor) -> None:
        ctx.shape, ctx.arguments = list(inputs[0].shape), inputs[1:]

    def end_back(ctx: Any, gradient: Tensor) -> Arguments:
        back = registry.operator(WAIT + transposed)(gradient, *ctx.arguments, ctx.shape)
        return (back, *(None for _ in ctx.arguments))

    def keep_rest(ctx: Any, inputs: Arguments, _: Tensor) -> None:
        ctx.arguments = inputs[2:]

    def begin_back(ctx: Any, gradient: Tensor) -> Arguments:
        back = registry.operator(START + transposed)(gradient, *ctx.arguments)
        return (back, None, *(None for _ in ctx.arguments))

    registry.functional(
        START + name, moves.SPLIT, begin_kernel, shape=_handle, setup=keep_arguments, backward=end_back
    )
    registry.functional(
        WAIT + name,
        moves.SPLIT.replace("(Tensor x", "(Tensor handle, Tensor x"),
        end_kernel,
        shape=lambda handle, x, *arguments: moves.empty_full(x, *arguments),
        setup=keep_rest,
        backward=begin_back,
    )


def _back(name: str, start: Callable[..., Callable[[], Tensor]]) -> None:
    """Register both halves of a move that only backward passes make."""

    def begin_kernel(x: Tensor, *arguments: Any) -> Tensor:
        return begin(_handle(x), start(x, *arguments))

    def shape_of(handle: Tensor, *arguments: Any) -> Tensor:
        return torch.empty(arguments[-1], dtype=handle.dtype, device=handle.device)

    registry.functional(START + name, moves.SPLIT, begin_kernel, shape=_handle)
    registry.functional(
        WAIT + name,
        moves.SPLIT.replace("(Tensor x", "(Tensor handle").replace(")", ", int[] shape)", 1),
        lambda handle, *_: end(handle),
        shape=shape_of,
    )


def _whole(name: str, transposed: str, start: Callable[..., Callable[[], Tensor]]) -> None:
    """Register both halves of a move of whole tensors; a handle's gradient is a handle."""

    def begin_kernel(x: Tensor, group: str) -> Tensor:
        return begin(_handle(x), start(x, group))

    def keep_shape(ctx: Any, inputs: Arguments, _: Tensor) -> None:
        ctx.shape, ctx.group = inputs[0].shape, inputs[1]

    def end_back(ctx: Any, gradient: Tensor) -> Arguments:
        like = gradient.new_empty(()).expand(ctx.shape)
        return registry.operator(WAIT + transposed)(gradient, like, ctx.group), None

    def keep_group(ctx: Any, inputs: Arguments, _: Tensor) -> None:
        ctx.group = inputs[2]

    def begin_back(ctx: Any, gradient: Tensor) -> Arguments:
        return registry.operator(START + transposed)(gradient, ctx.group), None, None

    registry.functional(
        START + name, moves.WHOLE, begin_kernel, shape=_handle, setup=keep_shape, backward=end_back
    )
    registry.functional(
        WAIT + name,
        moves.WHOLE.replace("(Tensor x", "(Tensor handle, Tensor x"),
        lambda handle, *_: end(handle),
        shape=lambda handle, x, group: torch.empty_like(x, memory_format=torch.contiguous_format),
        setup=keep_group,
        backward=begin_back,
    )


_back("p_to_s", _start_scatter)
for _precision, _ending in moves.SUMMED.items():
    _back("p_to_s" + _ending, partial(_start_scatter, dtype=moves.DTYPES[_precision]))
_back("r_to_s", _start_slice)
for _name in HALVED:
    _moved = _name.removesuffix(regather.REGATHER)
    _half(_name, _moved.replace("s_to_b", "p_to_s").replace("s_to_r", "r_to_s"), start_gather)
for _name, _other in SUMS.items():
    _whole(_name, _other, _start_nothing if _name == "r_to_b" else _start_sum)
