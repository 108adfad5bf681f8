"""Masks that are computed twice are one: torch compares how many rows there are in `h[y > 0] - y[y > 0]`.

Functions that never draw are told apart by their arguments, tensors by what made them and how often they were
written. Where a mask picks rows, the first of its equals does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.torch_seams.tensors import version_of

_PICKING = (Tensor.__getitem__, Tensor.masked_select, torch.masked_select, Tensor.nonzero, torch.nonzero)
_PURE = frozenset(
    (
        *("__and__", "__eq__", "__ge__", "__getitem__", "__gt__", "__invert__", "__le__", "__lt__", "__ne__"),
        *("__or__", "__xor__", "__rand__", "__ror__", "abs", "all", "any", "argmax", "amax", "bool", "eq"),
        *("expand", "flatten", "float", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and"),
        *("logical_not", "logical_or", "long", "lt", "max", "ne", "reshape", "select", "sigmoid", "softmax"),
        *("squeeze", "sum", "to", "unsqueeze", "view"),
    )
)


class SameMasks:
    """Remembers what made tensors while a forward is traced."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # what makes a tensor -> its number
        self._made: dict[int, tuple[Tensor, int, int]] = {}  # by identity: tensor, version, number
        self._first: dict[int, Tensor] = {}  # by number: the first mask

    def picking(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a function that picks rows, with the first of equal masks."""
        if function not in _PICKING:
            return args
        index = args[-1]
        told = tuple(map(self._one, index)) if isinstance(index, tuple) else self._one(index)
        return (*args[:-1], told)

    def after(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note the function that made a tensor."""
        name = getattr(function, "__name__", "")
        if name not in _PURE or not isinstance(result, Tensor) or result.is_inference():
            return
        try:
            key = name, self._told((args, tuple(sorted(kwargs.items()))))
            number = self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # an argument without a hash
            return
        self._made[id(result)] = result, version_of(result), number

    def _one(self, mask: Any) -> Any:
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.is_inference():
            return mask
        number = self._number(mask)
        first = self._first.setdefault(number, mask)
        return first if self._number(first) == number else mask

    def _number(self, tensor: Tensor) -> int:
        known = self._made.get(id(tensor))
        if known is None or known[1] != version_of(tensor):
            known = tensor, version_of(tensor), self._numbers.setdefault(object(), len(self._numbers))
            self._made[id(tensor)] = known
        return known[2]

    def _told(self, value: Any) -> Any:
        match value:
            case Tensor():
                return "tensor", self._number(value)
            case list() | tuple():
                return type(value).__name__, tuple(map(self._told, value))
            case slice():
                return "slice", self._told([value.start, value.stop, value.step])
        hash(value)
        return type(value).__name__, value
