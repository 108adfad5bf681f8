"""Calls of a parallel module inside what transforms functions: compilers, tracers, vmap.

    torch.compile(parallel)(x)      its programs are compiled, the rest runs as it is
    export, fx, jit.trace           refused: what they would write down speaks to other ranks
    vmap, func.grad, make_fx        refused: a program takes plain tensors, and gives gradients by backward

A program is compiled by itself, since Python around it reads state, places gradients and checks calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.errors import InputError
from autopar.torch_seams.fakes import FakeTensor
from autopar.torch_seams.pytree import tree_leaves
from autopar.torch_seams.transforms import innermost_transform, is_forward_mode, jit_tracing

Method = TypeVar("Method", bound=Callable[..., Any])


def entered(method: Method) -> Method:
    """A method that is called from outside: plainly, or by what was torch.compile'd."""

    @functools.wraps(method)
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _enter_compiled(method, self, args, kwargs)
        refuse_transforms(f"{method.__name__} of the parallel module", (args, kwargs))
        return method(self, *args, **kwargs)

    return cast(Method, enter)


def _enter_compiled(*call: Any) -> Any:
    return _uncompiled()(*call)


# What torch.compiler.disable marks a function with, which imports the compiler: more than a second.
_REASON = "a parallel module compiles its own programs: leave out fullgraph"
vars(_enter_compiled).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)


@functools.cache
def _uncompiled() -> Any:
    return torch.compiler.disable(_call_compiled, reason=_REASON)


def _call_compiled(method: Callable[..., Any], self: Any, args: Any, kwargs: Any) -> Any:
    """The call as it is, of programs that are compiled."""
    if not self._autopar.compiles:
        self.compile()
    return method(self, *args, **kwargs)


def refuse_transforms(where: str, arguments: Any) -> None:
    """Raise InputError inside what takes functions apart, by its name."""
    by, remedy = _transform(arguments)
    if by:
        raise InputError(
            where=where,
            found=f"a call inside {by}",
            wanted="a plain call, whose program speaks to other ranks",
            remedy=remedy,
        )


def _transform(arguments: Any) -> tuple[str, str]:
    """Transformation of a call, and its remedy; two empty texts for a plain call."""
    serial = "take the serial model, inside `with autopar.full(parallel) as model:`"
    leaves = tree_leaves(arguments)
    if any(isinstance(item, fx.Proxy) for item in leaves):
        return "torch.fx.symbolic_trace", f"{serial}; print(parallel) shows its program"
    if torch.compiler.is_exporting():
        return "torch.export", serial
    if jit_tracing() is not None:
        return "torch.jit.trace", serial
    if innermost_transform() is not None:
        return "a transform of torch.func, such as vmap", f"pass a whole batch and call backward, or {serial}"
    if is_forward_mode():
        return "torch.autograd.forward_ad.dual_level", serial
    if get_proxy_mode() is not None:
        return "make_fx", serial
    if any(_is_fake(item) for item in leaves):
        return "FakeTensorMode", f"plan by autopar.plan, which takes tensors on the meta device, or {serial}"
    return "", ""


def _is_fake(item: Any) -> bool:
    return isinstance(item, Tensor) and isinstance(item, FakeTensor)
