"""Writes to parts of DTensors, by an index or through views.

    p[0] = 0.1                torch selects a row of the gathered tensor and writes into that copy: lost
    p.data[1:3].mul_(2)       the same

Here what is written says where it belongs in the whole, and every rank writes its own elements:

    numbers     0 1 2      the view of the numbers, (4, 5), says which elements p[1, 1:] are
                3 4 5
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.dtensors.whole_operators import laid_as, whole_values
from autopar.torch_seams.pytree import tree_map_only
from autopar.torch_seams.tensors import TensorBase

_VIEWS = frozenset(
    (
        *("__getitem__", "adjoint", "as_strided", "chunk", "contiguous", "detach", "diagonal", "dsplit"),
        *("expand", "expand_as", "flatten", "hsplit", "movedim", "moveaxis", "narrow", "permute", "ravel"),
        *("reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims"),
        *("t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
        "vsplit",
    )
)
COMPOSED = ("fill_diagonal_",)  # of views that torch doesn't take of DTensors
_PROPERTIES = {id(getattr(Tensor, name)): name for name in ("data", "T", "mT", "H", "mH")}
_ASKED = (
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "numel",
    "size",
)
# What reads a tensor's attribute that is no view, and functions that ask for no more: an optimizer does so
# twenty times of a parameter and step, which took half of what that costs.
READS = frozenset(
    (
        *(getattr(Tensor, name) for name in _ASKED),
        *(torch.is_complex, torch.is_floating_point, torch.numel),
        *(
            item.__get__
            for owner in (Tensor, TensorBase)
            for name, item in vars(owner).items()
            if isinstance(item, (GetSetDescriptorType, property)) and name not in _PROPERTIES.values()
        ),
    )
)
_NOT_WRITTEN = ("requires_grad_", "detach_", "rename_", "share_memory_", "__int__", "__index__", "__invert__")
_VIEW = "_autopar_view"


@dataclass(frozen=True, slots=True)
class _View:
    """Origin of a gathered part of a DTensor: the result `number` of a function of `base`."""

    base: DTensor
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int | None

    def of(self, tensor: Tensor) -> Tensor:
        """Take the same part of another tensor."""
        result = self.function(tensor, *self.args, **self.kwargs)
        part: Tensor = result if self.number is None else result[self.number]
        return part


def write_at(owner: DTensor, index: Any, value: Any) -> None:
    """`owner[index] = value` on whole tensors; collective."""
    with collective("a write to a part of a parameter or gradient"):
        index = _plain(index)
        value = _plain(value)
    mask = torch.zeros(owner.shape, dtype=torch.bool, device=owner.device)
    values = torch.zeros(owner.shape, dtype=owner.dtype, device=owner.device)
    mask[index] = True
    values[index] = value
    _write(owner, mask, values)


def write_wholly(
    function: Callable[..., Any], owner: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    """Run an in-place function on the whole tensor, and keep each rank's part; a collective."""
    with collective("a write to a part of a parameter or gradient"):
        whole = whole_values(owner, copied=True)
    function(whole, *args, **kwargs)
    _write(owner, torch.ones_like(whole, dtype=torch.bool), whole)
    return owner


def follow(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """After a function of a DTensor: remember what its results are views of, and write on what it wrote."""
    name, owner = function.__name__, args[0]
    if name in _VIEWS or _is_property(function):
        results = enumerate(result) if isinstance(result, (tuple, list)) else [(None, result)]
        for number, part in results:
            if isinstance(part, DTensor) and part is not owner and _is_apart(owner, part):
                setattr(part, _VIEW, _View(owner, function, args[1:], kwargs, number))
    elif name != "__setitem__" and writes_to_part(function, owner):
        write_on(owner)


def concerns(function: Callable[..., Any], owner: DTensor) -> bool:
    """Whether a function of `owner` makes views of it, or writes to a part of a DTensor."""
    is_view = function.__name__ in _VIEWS or _is_property(function)
    return is_view or writes_to_part(function, owner)


def writes_to_part(function: Callable[..., Any], owner: DTensor) -> bool:
    """Whether a function writes by an index, or to a gathered part of another DTensor."""
    name = function.__name__
    return name == "__setitem__" or name in COMPOSED or (_writes(name) and hasattr(owner, _VIEW))


def _is_property(function: Callable[..., Any]) -> bool:
    return function.__name__ == "__get__" and id(getattr(function, "__self__", None)) in _PROPERTIES


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITTEN
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in _NOT_WRITTEN)


def _is_apart(owner: DTensor, part: DTensor) -> bool:
    """Whether a serial model's view has memory of its own here, or is a part of what has."""
    pairs = zip(owner.placements, part.placements, strict=True)
    gathered = any(isinstance(was, Shard) and not isinstance(now, Shard) for was, now in pairs)
    return gathered or hasattr(owner, _VIEW)


def is_part(value: Any) -> bool:
    """Whether a value is a part of a DTensor, with memory of its own."""
    return isinstance(value, DTensor) and hasattr(value, _VIEW)


def places_in_root(part: DTensor) -> tuple[DTensor, Tensor]:
    """The DTensor of which a part is a part at last, and which of its elements are the part's."""
    views: list[_View] = []
    root = part
    while hasattr(root, _VIEW):
        views.append(getattr(root, _VIEW))
        root = views[-1].base
    places = torch.arange(root.numel(), device=root.device).view(root.shape)
    for view in reversed(views):
        places = view.of(places)
    return root, places


@torch.no_grad()
def write_on(part: DTensor) -> None:
    """Write the values of `part` into what it is a part of, and so on; autograd has seen to gradients."""
    view: _View = getattr(part, _VIEW)
    base = view.base
    numbers = torch.empty_strided(base.shape, base.stride(), dtype=torch.long, device=base.device)
    numbers.copy_(torch.arange(base.numel(), device=base.device).view(base.shape))
    places = view.of(numbers)
    if places.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():
        return  # a copy in a serial model, too
    with collective("a write to a part of a parameter or gradient"):
        value = whole_values(part)
    mask = torch.zeros(base.numel(), dtype=torch.bool, device=base.device)
    values = torch.zeros(base.numel(), dtype=base.dtype, device=base.device)
    mask[places.flatten()] = True
    values[places.flatten()] = value.flatten()
    _write(base, mask.view(base.shape), values.view(base.shape))


def _write(owner: DTensor, mask: Tensor, values: Tensor) -> None:
    """Put the whole `values` where the whole `mask` says, each rank in its own rows."""
    owner.copy_(torch.where(laid_as(owner, mask), laid_as(owner, values), owner))
    if hasattr(owner, _VIEW):
        write_on(owner)


def _plain(value: Any) -> Any:
    return tree_map_only(DTensor, whole_values, value)
