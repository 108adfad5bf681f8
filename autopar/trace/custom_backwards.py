"""Backwards that a model writes itself, caught while it is traced: an exported graph has none of them.

    Flip.apply(x, 0.7)                 a Function whose backward may be any function of the gradient
    x.register_hook(lambda g: g / 2)   another gradient for x
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.trace.user_source import calling_line

_Single: Any = torch.autograd.function._SingleLevelFunction  # where every `apply` ends, also one kept aside
_OURS = ("torch._", "autopar.")  # whose Functions are no user's
_HOOKS: dict[Any, str] = {
    torch.Tensor.register_hook: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
}


@contextmanager
def caught(model: nn.Module) -> Iterator[None]:
    """Within, no backward of the user's own goes unnoticed: raises TraceError at its line."""
    _check_module_hooks(model)

    def apply(function: Any, *args: Any) -> Any:
        if function.__module__.startswith(_OURS):
            return super(_Single, function).apply(*args)
        raise _refused(f"the backward of {function.__qualname__}")

    with patch.object(_Single, "apply", classmethod(apply), create=True), _Hooks():
        yield


class _Hooks(TorchFunctionMode):
    """Notices hooks on tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _HOOKS:
            raise _refused(f"{_HOOKS[function]} inside forward")
        return function(*args, **(kwargs or {}))


def _check_module_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                where=f"{name or 'the model'} ({type(module).__name__})",
                found="a backward hook of the module",
                wanted="gradients that are the forward's derivatives",
                remedy="remove the hook, or put an autograd.Function with that backward into forward",
            )


def _refused(found: str) -> TraceError:
    return TraceError(
        where=calling_line(),
        found=found,
        wanted="gradients that are the forward's derivatives",
        remedy="say it by operators: x * a + (x * (1 - a)).detach() scales the gradient of x by a",
    )
