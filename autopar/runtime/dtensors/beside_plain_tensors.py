"""Parameters outside the program beside what isn't sharded: plain tensors, NumPy, format strings.

    weight - start               a plain tensor is whole, the same on every rank: each takes its part's rows
    weight.data = start          the same (assigned_tensors.py)
    weight.numpy(), .tolist()    refused: a part is no whole array
    f"{weight.mean():.3f}"       the number, read whole
    weight[[0, 3]]               composed_calls.py
    weight[0] = 0.1              written_parts.py
    weight.normal_()             whole_operators.py

torch refuses plain tensors beside DTensors. They are right where a DTensor's rows lie in serial order. Then
each becomes a replicated DTensor, so that backward knows it as one and gives it a plain, whole gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import InputError
from autopar.runtime.dtensors.assigned_tensors import assign, assigned
from autopar.runtime.dtensors.composed_calls import (
    computed_wholly,
    with_tensors_as_indices,
    write_each_on,
    writes_each,
)
from autopar.runtime.dtensors.whole_operators import compute_wholly
from autopar.runtime.dtensors.written_parts import (
    COMPOSED,
    READS,
    concerns,
    follow,
    is_part,
    write_at,
    write_wholly,
    writes_to_part,
)
from autopar.torch_seams.modes import default_torch_function, without_subclass_functions
from autopar.trace.call.user_source import calling_line

_REMEDY = (
    "take the full tensor, parallel.gather(name, tensor) on every rank, or compute it inside "
    "`with autopar.full(parallel) as model:`"
)
_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class _OwnedMesh:
    """A mesh of ours while its owner lives, why plain tensors don't fit, whether weights are in blocks."""

    owner: weakref.ref[object]
    mesh: DeviceMesh
    obstacle: str
    in_blocks: bool
    staged: bool


_known: list[_OwnedMesh] = []


def take_plain_tensors(
    owner: object,
    mesh: DeviceMesh,
    obstacle: str = "",
    *,
    in_blocks: bool = False,
    staged: bool = False,
) -> None:
    """While `owner` lives, operators of DTensors on `mesh` take plain tensors, or say an `obstacle`.

    `in_blocks` says that rows of some lie in another order than serially, `staged` that ranks of other
    stages have other parameters.
    """
    known = _OwnedMesh(weakref.ref(owner), mesh, obstacle, in_blocks, staged)
    _known[:] = [item for item in _known if item.owner() is not None] + [known]
    compute_wholly(_is_ours)
    if DTensor.__torch_function__ is default_torch_function:
        setattr(DTensor, "__torch_function__", classmethod(_torch_function))  # noqa: B010
    methods = {"numpy": _no_array("numpy"), "tolist": _no_array("tolist"), "__format__": _format}
    for name, method in methods.items():
        if name not in vars(DTensor):
            setattr(DTensor, name, method)


def _torch_function(
    _cls: type, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    if not kwargs and (function in READS or (function.__name__ == "__set__" and args[-1] is None)):
        return default_torch_function(function, _types, args)
    kwargs = kwargs or {}
    with without_subclass_functions():
        owner = kwargs.get("out")
        if isinstance(owner, DTensor) and _obstacles(owner.device_mesh):
            given = {name: value for name, value in kwargs.items() if name != "out"}
            return _torch_function(_cls, Tensor.copy_, (), (owner, _computed(function, args, given)))
        owner = args[0] if args else None
        if isinstance(owner, (list, tuple)) and writes_each(function, args):
            return _written_each(function, args, kwargs)
        if (
            not isinstance(owner, DTensor)
            or not concerns(function, owner)
            or not _obstacles(owner.device_mesh)
        ):
            return _computed(function, args, kwargs)
        if function.__name__ == "__getitem__":
            args = (owner, with_tensors_as_indices(owner, args[1]))
        if writes_to_part(function, owner):
            _check_parts(function.__name__, owner.device_mesh, args)
        if function.__name__ == "__setitem__":
            return write_at(*args)
        if function.__name__ in COMPOSED:
            return write_wholly(function, owner, args[1:], kwargs)
        result = _computed(function, args, kwargs)
        follow(function, args, kwargs, result)
        return result


def _written_each(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to a list of tensors, of which some are parts of DTensors."""
    for part in filter(is_part, args[0]):
        if not _obstacles(part.device_mesh):
            return _computed(function, args, kwargs)
        _check_parts(function.__name__, part.device_mesh, (part, *args[1:]))
    return write_each_on(function, args, functools.partial(_computed, function, args, kwargs))


def _computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function.__name__ in ("__get__", "__set__"):  # a property such as dtype
        return _property(function, args)
    tensors = _tensors((args, kwargs))
    plain = [item for item in tensors if type(item) in _PLAIN and _is_plain(item)]
    if not plain:
        return _composed(function, args, kwargs)
    sharded = (item for item in tensors if isinstance(item, DTensor))
    mesh = next((item.device_mesh for item in sharded), None)
    obstacles = [] if mesh is None else _obstacles(mesh)
    if mesh is None or not obstacles:
        return function(*args, **kwargs)
    _check(function.__name__, plain, obstacles)
    whole = _replicated(args, mesh), _replicated(kwargs, mesh)
    result = _composed(function, *whole)
    is_in_place = function.__name__.endswith("_") and not function.__name__.endswith("__")
    return args[0] if is_in_place and args and type(args[0]) in _PLAIN else result


def _composed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of DTensors; one that torch can't compose of them is computed on whole tensors."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as cause:
        sharded = next((item for item in _tensors((args, kwargs)) if isinstance(item, DTensor)), None)
        if sharded is None or not _is_ours(function.__name__, sharded.device_mesh):
            raise
        if any(obstacles := _obstacles(sharded.device_mesh)):
            found = f"{function.__name__} of a parameter or gradient {max(obstacles)}"
            raise _refused(found, "an operator of elements, a sum or a norm") from cause
        return computed_wholly(function, args, kwargs, cause)


def _property(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Get or set a property; tensors that are assigned to one lie as its owner does."""
    name = assigned(function)
    if name is None or len(args) != 2 or not isinstance(args[1], Tensor):
        return function(*args)
    owner, value = args
    obstacles = _obstacles(owner.device_mesh) if isinstance(owner, DTensor) else []
    if not obstacles:
        return function(*args)
    if not isinstance(value, DTensor):
        _check(f"an assignment to .{name}", [value], obstacles)
    return assign(name, owner, value)


def _is_plain(value: Any) -> bool:
    """Whether a value is a plain tensor that torch doesn't take beside DTensors, or whose gradient would be
    lost."""
    wants_gradient = torch.is_grad_enabled() and type(value) in _PLAIN and value.requires_grad
    return type(value) in _PLAIN and (value.numel() != 1 or wants_gradient)


def _check(name: str, plain: list[Tensor], obstacles: list[str]) -> None:
    """Raise InputError for plain tensors that don't lie as DTensors do."""
    if any(obstacles) and any(tensor.numel() != 1 for tensor in plain):
        found = f"{name} of a parameter or gradient and a plain tensor {max(obstacles)}"
        raise _refused(found, "tensors that lie alike")


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in lists, tuples and dicts."""
    found: list[Tensor] = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            left.extend(reversed(item))
        elif isinstance(item, dict):
            left.extend(reversed(item.values()))
    return found


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    """Put DTensors in the place of plain tensors, in the same memory."""
    match value:
        case list() | tuple():
            return type(value)([_replicated(item, mesh) for item in value])
        case dict():
            return {key: _replicated(item, mesh) for key, item in value.items()}
    if not _is_plain(value):
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _obstacles(mesh: DeviceMesh) -> list[str]:
    """Reasons why plain tensors don't fit beside those of each module on such a mesh; none for others."""
    return [item.obstacle for item in _known if item.mesh == mesh and item.owner() is not None]


def _is_ours(name: str, mesh: DeviceMesh, *, by_rows: bool = False, draws: bool = False) -> bool:
    """Whether a mesh is one of ours; raises InputError for an operator that can't be right on it."""
    ours = [item for item in _known if item.mesh == mesh and item.owner() is not None]
    if by_rows and any(item.in_blocks for item in ours):
        raise _refused(
            f"{name}, which writes to rows of a parameter or gradient that may be stored in blocks",
            "operators of elements, sums and norms",
        )
    if draws and any(item.staged for item in ours):
        raise InputError(
            where=calling_line(),
            found=f"{name} of a parameter or gradient of one pipeline stage, which others don't draw",
            wanted="the random numbers of the serial model",
            remedy="draw inside `with autopar.full(parallel) as model:`",
        )
    return bool(ours)


def _check_parts(name: str, mesh: DeviceMesh, args: tuple[Any, ...]) -> None:
    """Raise InputError for a write to a part whose rows, or whose plain values, lie otherwise."""
    _is_ours(name, mesh, by_rows=True)
    if name != "__setitem__" and torch.is_grad_enabled() and args[0].requires_grad:
        raise InputError(
            where=calling_line(),
            found=f"{name} of a part of a sharded tensor with a gradient",
            wanted="writes by an index where gradients flow, or under torch.no_grad()",
            remedy="write w[rows] = value, or torch.where(mask, value, w)",
        )
    _check(name, [item for item in _tensors(args) if _is_plain(item)], _obstacles(mesh))


def _refused(found: str, wanted: str) -> InputError:
    return InputError(where=calling_line(), found=found, wanted=wanted, remedy=_REMEDY)


def _no_array(name: str) -> Callable[..., Any]:
    def refuse(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if _obstacles(tensor.device_mesh):
            found = f"{name}() of a parameter or gradient, of which ranks have parts"
            raise _refused(found, "a plain tensor")
        return getattr(Tensor, name)(tensor, *args, **kwargs)

    return refuse


def _format(tensor: DTensor, spec: str) -> str:
    if not tensor.dim() and _obstacles(tensor.device_mesh):
        return format(tensor.item(), spec)
    return object.__format__(tensor, spec)
