"""Calls that torch composes of DTensors and plain tensors of its own making, which it then refuses.

p[[0, 3]], p[array]              indices in a list become tensors, as those that are passed do
p[mask]                          the rows that a plain mask keeps, by their numbers
torch._foreach_mul_([p[0]], 2)   what is written to rows is written on to the parameter
torch.quantile(p, 0.3, dim=0)    on whole tensors; refused where that has a gradient
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.dtensors.whole_operators import laid_as, whole_values
from autopar.runtime.dtensors.written_parts import is_part, places_in_root, write_on
from autopar.torch_seams.pytree import tree_leaves, tree_map_only
from autopar.trace.call.user_source import calling_line

_MIXED = "got mixed torch.Tensor and DTensor"  # torch's words
_LISTS = (list, range, np.ndarray)


def with_tensors_as_indices(owner: DTensor, index: Any) -> Any:
    """An index whose lists and plain masks are tensors of numbers of rows."""
    if isinstance(index, tuple):
        return tuple(each for item in index for each in _as_tensors(owner, item))
    made = _as_tensors(owner, index)
    return made[0] if len(made) == 1 else tuple(made)


def _as_tensors(owner: DTensor, item: Any) -> Sequence[Any]:
    if isinstance(item, _LISTS) and all(isinstance(leaf, (int, np.generic)) for leaf in _leaves(item)):
        item = torch.as_tensor(item if isinstance(item, np.ndarray) else [*item], device=owner.device)
        item = item.to(torch.int64) if not item.numel() else item
    is_mask = isinstance(item, Tensor) and not isinstance(item, DTensor) and item.dtype is torch.bool
    return item.nonzero(as_tuple=True) if is_mask and item.dim() else [item]


def _leaves(item: Any) -> Iterator[Any]:
    if not isinstance(item, _LISTS):
        yield item
    elif not isinstance(item, (range, np.ndarray)):
        for each in item:
            yield from _leaves(each)


def writes_each(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function writes to each tensor of a list, parts of DTensors among them."""
    name = function.__name__
    return name.startswith("_foreach_") and name.endswith("_") and any(map(is_part, args[0]))


def write_each_on(function: Callable[..., Any], args: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    """Let `compute` write to parts, and write these on to what they are parts of; collective.

    Raises InputError for parts of one call that share elements: here each has its own.
    """
    parts = [item for item in tree_leaves(args) if is_part(item)]
    _refuse_overlap(function.__name__, parts)
    result = compute()
    for part in args[0]:
        if is_part(part):
            write_on(part)
    return result


def _refuse_overlap(name: str, parts: Sequence[DTensor]) -> None:
    seen: dict[int, Tensor] = {}
    for part in parts:
        root, places = places_in_root(part)
        memory = root.to_local().data_ptr()
        taken = seen.setdefault(memory, torch.zeros(root.numel(), dtype=torch.bool, device=root.device))
        if taken[places.flatten()].any():
            raise InputError(
                where=calling_line(),
                found=f"{name} of parts of a sharded tensor that share elements",
                wanted="parts that lie apart, each of which a rank gathers",
                remedy="write to one after the other: w[rows] = value",
            )
        taken[places.flatten()] = True


def computed_wholly(function: Callable[..., Any], args: Any, kwargs: Any, cause: RuntimeError) -> Any:
    """Result of a function that torch can't compose of DTensors, on whole tensors; a collective.

    Raises InputError where the result would have a gradient, or the function writes, and `cause` if it says
    anything else.
    """
    if _MIXED not in str(cause):
        raise cause
    given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, DTensor)]
    learns = torch.is_grad_enabled() and any(item.requires_grad for item in given)
    if learns or function.__name__.endswith("_") or not given:
        raise InputError(
            where=calling_line(),
            found=f"{function.__name__} of a sharded parameter or gradient, beside plain tensors of its own",
            wanted="an operator of elements, a sum or a norm, or values without gradient",
            remedy="compute it of .detach(), in forward or loss_fn, or in "
            "`with autopar.full(parallel) as model:`",
        ) from cause
    with collective(f"{function.__name__} of a parameter or gradient"):
        whole = tree_map_only(DTensor, whole_values, (args, kwargs))
    with torch.no_grad():
        results = function(*whole[0], **whole[1])
        return tree_map_only(Tensor, lambda result: laid_as(given[0], result), results)
