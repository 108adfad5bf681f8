"""Methods of the user's that call the model itself, and what they must not do: generate token by token.

model.generate(ids)
    for _ in range(100):                        inputs of 7, 8, 9 ... tokens, each beginning with the last
        ids = cat(ids, self(ids).argmax())      call's: a program for each, and refused after the third
"""

from __future__ import annotations

import inspect
import sys
import types
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.trace.call.user_source import calling_line
from autopar.trace.reads.reachable_state import is_torch

MOST_GROWING_PROGRAMS = 3  # programs for inputs that grow


class GrowingCalls:
    """Looks at the calls of one module that need a new program."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, ...] = ()  # of a call that a method has made
        self._count = 0

    def see(self, tensors: tuple[Tensor, ...], method: types.FrameType | None) -> None:
        """Raise InputError where a `method` calls its model with inputs that have grown too often."""
        if method is None:
            self._last, self._count = (), 0
            return
        self._count = self._count + 1 if _has_grown(self._last, tensors) else 1
        self._last = tensors
        if self._count > MOST_GROWING_PROGRAMS:
            name = method.f_code.co_name
            self._last, self._count = (), 0
            raise InputError(
                where=f"{name}, {calling_line()}",
                found="calls of the model with ever longer inputs: a program for each, "
                f"{MOST_GROWING_PROGRAMS} were made",
                wanted="calls of few shapes",
                remedy=f"call it on the serial model: {inside(name)}",
            )


def inside(method: str) -> str:
    """Code that calls a method of the serial model."""
    return f"with autopar.full(parallel) as model: model.{method}(...)"


def calling_method(root: nn.Module, serial_class: type) -> types.FrameType | None:
    """The outermost running method of `root` that has called it, other than forward."""
    codes = _codes(serial_class)
    found = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in codes and code.co_varnames and frame.f_locals.get(code.co_varnames[0]) is root:
            found = frame
        frame = frame.f_back
    return found


@cache
def _codes(kind: type) -> frozenset[types.CodeType]:
    """The code of a class's own methods."""
    methods = [
        _unwrapped(value)
        for base in kind.__mro__
        if not is_torch(base.__module__)
        for name, value in vars(base).items()
        if name != "forward"
    ]
    return frozenset(method.__code__ for method in methods if isinstance(method, types.FunctionType))


def _unwrapped(value: Any) -> Any:
    return inspect.unwrap(value) if isinstance(value, types.FunctionType) else value


def _has_grown(last: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> bool:
    """Whether a call's tensors begin with those of the last call, and some are longer."""
    shapes, before = ([item.shape for item in call] for call in (tensors, last))
    if not last or len(last) != len(tensors) or shapes == before:
        return False
    return all(_begins_with(new, old) for new, old in zip(tensors, last, strict=True))


def _begins_with(new: Tensor, old: Tensor) -> bool:
    if new.shape == old.shape:
        return True  # a source, or the place of the last token
    if new.dim() != old.dim() or any(a < b for a, b in zip(new.shape, old.shape, strict=True)):
        return False
    return torch.equal(new[tuple(slice(size) for size in old.shape)], old)
