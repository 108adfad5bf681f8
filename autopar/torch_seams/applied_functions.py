"""Every call of an autograd.Function by its `apply`, however that is reached and whatever torch's version.

    2.13          Flip.apply is Python, and ends in its base's, also one kept aside: flip = Flip.apply
    2.14, 2.15    Flip.apply is C, and reads of its class _backward_cls, then, without gradients, forward

So from 2.14 on the class answers, while it is traced, with another `apply`, and C with another `forward`.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from autopar.torch_seams.autograd import FUNCTIONS_ARE_PYTHON, SingleLevelFunction, set_grad_enabled
from autopar.torch_seams.modes import without_functions

_Meta: Any = type(SingleLevelFunction)

Instead = Callable[..., Any]  # of a Function and the arguments of its `apply`


@contextmanager
def calling(instead: Instead) -> Iterator[None]:
    """Within, `instead` is called in the place of every `apply`; `plainly` is torch's own."""
    if FUNCTIONS_ARE_PYTHON:
        with patch.object(SingleLevelFunction, "apply", classmethod(instead), create=True):
            yield
    else:
        with patch.object(_Meta, "__getattribute__", _Asked(instead).read, create=True):
            yield


def plainly(function: Any, *args: Any) -> Any:
    """The result of torch's own `apply`."""
    return super(SingleLevelFunction, function).apply(*args)


class _Asked:
    """Answers of a Function to code that reads its attributes."""

    def __init__(self, instead: Instead) -> None:
        def read(function: Any, name: str) -> Any:
            found = type.__getattribute__(function, name)
            if name == "_backward_cls":
                self.learns[function] = torch.is_grad_enabled()
            if name == "apply" and not _is_ours(sys._getframe(1).f_globals):
                return partial(instead, function)
            if name == "forward" and _is_calling(sys._getframe(1)):
                return partial(self.forward, function)
            return found

        self.instead, self.read = instead, read
        self.learns: dict[Any, bool] = {}  # whether the call that asked last would give gradients

    def forward(self, function: Any, *args: Any) -> Any:
        """In the place of the forward that C calls; what gets no gradient gets none from C, either."""
        context = args[0] if function.setup_context == SingleLevelFunction.setup_context else None
        with _gradients(self.learns.pop(function, True)):
            results = self.instead(function, *(args if context is None else args[1:]))
        several = results if isinstance(results, tuple) else (results,)
        if context is not None:
            tensors = [item for item in several if isinstance(item, torch.Tensor)]
            context.mark_non_differentiable(*(item for item in tensors if not item.requires_grad))
        return results


@contextmanager
def _gradients(enabled: bool) -> Iterator[None]:
    """Set the mode past torch's own modes: it is no part of what is traced that C had turned it off."""
    before = torch.is_grad_enabled()
    _set_gradients(enabled)
    try:
        yield
    finally:
        _set_gradients(before)


def _set_gradients(enabled: bool) -> None:
    with without_functions():
        set_grad_enabled(enabled)


def _is_ours(variables: dict[str, Any]) -> bool:
    return str(variables.get("__name__", "")).startswith("autopar.")


def _is_calling(frame: Any) -> bool:
    """True if the frame calls something in C, which reads the attribute: it doesn't read it itself."""
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return operation.startswith("CALL") and not _is_ours(frame.f_globals)
