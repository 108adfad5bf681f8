"""Optimizers on sharded parameters: the slow way round is avoided, the impossible refused by name.

Element-wise optimizers (SGD, Adam, AdamW and the like) and norms of single parameters (LARS, LAMB) compute on
DTensors what they compute on the full tensors. Those that DTensors can't take have a way of their own
(whole_steps.py). What is left are optimizers of all parameters together, of which stages have a part.

Each operation on a DTensor costs some 50 us of Python beside the arithmetic, and each is one more
pass over memory. Where the user leaves the choice to torch, a step takes the fastest way there is:

    one pass, fused          5.4 ms SGD with momentum, 16 ms AdamW: on CPUs, single or double precision
    one list for each pass   8.5 ms, 73 ms                          elsewhere, as torch chooses on GPUs
    one parameter at a time  8.5 ms, 83 ms                          (22 plain tensors, 22 MB, one core)
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autopar.errors import InputError
from autopar.runtime.parameters.parameters import distribute, local, plainly
from autopar.runtime.tree.user_tree import PlacedTensor, UserTree
from autopar.torch_seams.dtensors import handlers, spec_of

_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_FUSED_DTYPES = (torch.float32, torch.float64)  # of fewer bits, fused steps round less often than others
# What each does that stages don't allow, nor shards of unequal sizes, which DTensor doesn't flatten.
_TOGETHER = {"LBFGS": "takes one step along all parameters"}


class TreeOwner(Protocol):
    """An owner of parameters, with its tree."""

    tree: UserTree


def refuse_together(owner: object, mesh: DeviceMesh, *, staged: bool) -> None:
    """While `owner` lives, such an optimizer's step of parameters on `mesh` raises InputError. It does where
    these are of one stage or lie in unequal shards."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _TOGETHER]
        if not kinds:
            return
        held = [item for group in optimizer.param_groups for item in group["params"] if _is_on(item, mesh)]
        if (staged and held) or any(map(_is_uneven, held)):
            raise InputError(
                where=f"optimizer {type(optimizer).__name__}",
                found="the parameters of one pipeline stage" if staged else "parameters in unequal shards",
                wanted=f"all parameters alike: {kinds[0]} {_TOGETHER[kinds[0]]}",
                remedy="use an optimizer that steps each parameter by itself, or plan without stages, with "
                'force="batch" and shard_state="none"',
            )

    at_steps(register_optimizer_step_pre_hook, owner, check)


def step_fast(owner: TreeOwner) -> None:
    """While `owner` lives, groups of its parameters take `foreach`, or `fused`, for each step. They do where
    they leave `foreach` open, and `fused` if that is open too."""
    alive = weakref.ref(owner)  # torch's list of hooks would keep it

    def choose(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if type(optimizer) not in _ELEMENTWISE:
            return
        open_groups = [group for group in optimizer.param_groups if _is_open(group)]
        if not open_groups or (owner := alive()) is None:
            return
        own = {*map(id, owner.tree.parameters()), *map(id, owner.tree.nothing)}
        closure = any((*args[1:], *kwargs.values()))  # which has yet to make the gradients
        for group in open_groups:
            if own.issuperset(map(id, group["params"])):
                fused = group["fused"] is None and not closure and _can_fuse(optimizer, group["params"])
                way = "fused" if fused else "foreach"
                chosen.append((group, way))
                group[way] = True

    def restore(*_: Any) -> None:
        while chosen:
            group, way = chosen.pop()
            group[way] = None
            if way == "fused":  # whose kernels write without a trace, so that backward couldn't tell
                increment_version([item for item in group["params"] if item.grad is not None])

    chosen: list[tuple[dict[str, Any], str]] = []
    at_steps(register_optimizer_step_pre_hook, owner, choose)
    at_steps(register_optimizer_step_post_hook, owner, restore)


# -- optimizers that were there before ----------------------------------------------------------


def take_over(
    owner: object,
    placed: Sequence[PlacedTensor],
    mesh: DeviceMesh,
    nothing: Sequence[nn.Parameter],
    *,
    tell: bool,
) -> None:
    """Let optimizers of the serial model's parameters step the parallel ones, and `tell` so.

    What holds serial parameters otherwise raises InputError at its first step. `nothing` goes to optimizers
    that have no parameter on this rank.
    """
    parts = {id(item.whole): item for item in placed}
    kinds = [_repoint(optimizer, parts, mesh, nothing) for optimizer in _optimizers_of(parts)]
    if kinds and tell:
        print(
            f"autopar: {', '.join(kinds)} was made before parallelize; it steps the parallel module's "
            "parameters from now on",
            file=sys.stderr,
            flush=True,
        )
    taken = {id(item.whole): weakref.ref(item.whole) for item in placed}

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for item in group["params"]:
                if (known := taken.get(id(item))) is not None and known() is item:
                    raise InputError(
                        where=f"step of {type(optimizer).__name__}",
                        found="parameters of the serial model, which parallelize has replaced",
                        wanted="those of the parallel module",
                        remedy="make the optimizer after parallelize, of parallel.parameters()",
                    )

    at_steps(register_optimizer_step_pre_hook, owner, check)


def _optimizers_of(parts: Mapping[int, PlacedTensor]) -> list[torch.optim.Optimizer]:
    """The optimizers alive that hold some of these parameters."""
    alive = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
    return [
        item
        for item in alive
        if any(
            id(tensor) in parts for group in getattr(item, "param_groups", ()) for tensor in group["params"]
        )
    ]


def _repoint(
    optimizer: torch.optim.Optimizer,
    parts: Mapping[int, PlacedTensor],
    mesh: DeviceMesh,
    nothing: Sequence[nn.Parameter],
) -> str:
    """Put this rank's parts in the place of parameters and of what is kept for them; the optimizer's name."""
    for group in optimizer.param_groups:
        held = [parts[id(item)].part if id(item) in parts else item for item in group["params"]]
        if "param_names" in group:
            pairs = zip(group["param_names"], held, strict=True)
            group["param_names"] = [name for name, item in pairs if item is not None]
        group["params"][:] = [item for item in held if item is not None]
    if not any(group["params"] for group in optimizer.param_groups):
        optimizer.param_groups[0]["params"].extend(nothing)
    for parameter in [item for item in optimizer.state if id(item) in parts]:
        placed, state = parts[id(parameter)], optimizer.state.pop(parameter)
        if placed.part is not None:
            optimizer.state[placed.part] = {
                name: _part_of(value, placed, mesh) for name, value in state.items()
            }
    return type(optimizer).__name__


def _part_of(value: Any, placed: PlacedTensor, mesh: DeviceMesh) -> Any:
    """The rank's part of a moment, of anything else the whole."""
    part = placed.stored.part
    if not isinstance(value, Tensor) or value.shape != placed.whole.shape or not value.dim():
        return value
    assert placed.part is not None
    mine = part.part.take(value.detach()).to(local(placed.part).device)
    mine = mine.clone(memory_format=torch.contiguous_format)
    return distribute(part, mine, mesh) if isinstance(placed.part, DTensor) else mine


_hooks: list[tuple[weakref.ref[object], RemovableHandle]] = []
_makes_state: ContextVar[bool] = ContextVar("makes_state", default=False)


def at_steps(register: Callable[[Any], RemovableHandle], owner: object, hook: Callable[..., None]) -> None:
    """Call `hook` at every optimizer's steps while `owner` lives, and then until the next one comes: where an
    owner dies, torch may just be walking through its hooks."""
    for known in [each for each in _hooks if each[0]() is None]:
        _hooks.remove(known)
        known[1].remove()
    _hooks.append((weakref.ref(owner), register(hook)))


@contextmanager
def state_only() -> Iterator[None]:
    """Let an optimizer's step, by which it makes its state, count as none of the training loop."""
    token = _makes_state.set(True)
    try:
        yield
    finally:
        _makes_state.reset(token)


def makes_state() -> bool:
    """True while an optimizer steps to make its state alone."""
    return _makes_state.get()


def _is_open(group: Mapping[str, Any]) -> bool:
    return group["foreach"] is None and not group["fused"] and not group["differentiable"]


def _is_on(parameter: Any, mesh: DeviceMesh) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh == mesh


def _is_uneven(parameter: DTensor) -> bool:
    """Whether the ranks' parts differ in size."""
    pieces = [1] * parameter.dim()
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            pieces[placement.dim] *= parameter.device_mesh.size(axis)
    return any(size % count for size, count in zip(parameter.shape, pieces, strict=True))


# -- fused steps --------------------------------------------------------------------------------


def _can_fuse(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Whether a fused step is right. Its kernels walk through all tensors of a parameter in one
    order, count Adam's steps in float32, and begin the momentum of all parameters together."""
    with plainly():
        moving = [item for item in parameters if item.grad is not None]
        states = [optimizer.state.get(item, {}) for item in moving]
        return (
            len({state.get("momentum_buffer") is None for state in states}) <= 1
            and all(state["step"].dtype is torch.float32 for state in states if "step" in state)
            and all(
                _alike([item, item.grad, *_wide(state)]) for item, state in zip(moving, states, strict=True)
            )
        )


def _wide(state: Mapping[str, Any]) -> Iterable[Any]:
    """The tensors of an optimizer's state that are shaped like the parameter."""
    return (value for name, value in state.items() if name != "step" and isinstance(value, Tensor))


def _alike(tensors: Iterable[Any]) -> bool:
    """Whether these are on a CPU, in full precision, and lie in the same way without gaps."""
    items = tuple(tensors)
    return _lie_alike(items) and local(items[0]).is_cpu and local(items[0]).dtype in _FUSED_DTYPES


def _lie_alike(items: tuple[Any, ...]) -> bool:
    """Whether these, all DTensors or none, are of one dtype and device and lie in the same way without
    gaps."""
    parts, laid = list(map(local, items)), [item for item in items if isinstance(item, DTensor)]
    dtype, device = parts[0].dtype, parts[0].device
    ways = {spec_of(item).placements for item in laid}
    return (
        len(laid) in (0, len(items))
        and len(ways) <= 1
        and not any(placement.is_partial() for way in ways for placement in way)
        and all(part.dtype is dtype and part.device == device and part.is_contiguous() for part in parts)
    )


def _fused_sgd(
    _kind: type, operator: Any, _types: Any, lists: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Fused SGD on the local parts of parameters, gradients and momenta: torch has it for Adam alone."""
    if not all(map(_alike, zip(*(tensors for tensors in lists if tensors), strict=True))):
        raise InputError(
            where="fused SGD on DTensors",
            found="a parameter with a gradient or momentum that lies otherwise",
            wanted="contiguous parts in float32 or float64 on a CPU, with equal placements",
            remedy="pass fused=False",
        )
    operator(*([local(tensor) for tensor in tensors] for tensors in lists), **options)


for _name in ("aten::_fused_sgd_", "aten::_fused_sgd_.tensor_lr"):
    torch.library.register_torch_dispatch(_name, DTensor, _fused_sgd)


def _fused_adam(operator: Any, lists: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Fused Adam on local parts; torch's way, which looks for a strategy first, where some lie otherwise."""
    *wide, steps = lists
    plain = not any(isinstance(value, DTensor) for value in (*steps, *options.values()))
    if plain and all(map(_lie_alike, zip(*(tensors for tensors in wide if tensors), strict=True))):
        operator(*([local(tensor) for tensor in tensors] for tensors in wide), steps, **options)
        return
    handlers.pop(operator)
    try:
        operator(*lists, **options)
    finally:
        handlers[operator] = _fused_adam


for _packet in (torch.ops.aten._fused_adam_, torch.ops.aten._fused_adamw_):
    for _overload in (_packet.default, _packet.tensor_lr):
        handlers.setdefault(_overload, _fused_adam)
