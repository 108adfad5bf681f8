"""Registering operators in the namespace `autopar`.

Registered operators, unlike Python functions, stay one node under `torch.compile`, are seen by
selective-checkpoint policies, and know their shapes on meta and fake tensors. Three kinds:

- `functional`: own kernel, shape function and backward; returns new contiguous tensors.
- `composite`: Python over other operators, through which shapes and autograd follow by themselves.
  It may alias its input or write into a buffer, as its schema then says.
- `constant`: a kernel through which no gradient flows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import InputError

NAMESPACE = "autopar"
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)


def operator(name: str) -> Any:
    """The registered overload, a `torch._ops.OpOverload`."""
    return getattr(torch.ops.autopar, name).default


def functional(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    *,
    shape: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """An operator with its kernel for real tensors, its `shape` function for fake ones, its backward.

    Without one it has no derivative, and asking for it raises InputError: torch would go on without.
    """
    _define(name, schema, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=_library)
    _library.impl(name, _differentiable(name, setup, backward or _refusal(name)), "Autograd")


def _differentiable(
    name: str, setup: Callable[..., None] | None, slope: Callable[..., Any]
) -> Callable[..., Any]:
    """What the operator does above its kernel. torch's own `register_autograd` looks through the schema at
    each call for arguments that were left out, of which these operators have none: 0.1 ms for ten of them."""
    overload = operator(name)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                result = overload(*args)
            if setup is not None:
                setup(ctx, args, result)
            return result

        backward = staticmethod(slope)

    apply: Any = Differentiable.apply  # ships without types

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return run


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise InputError(
            where=f"autopar::{name}",
            found="a derivative of it, asked for by a second derivative of the program",
            wanted="first derivatives",
            remedy="leave out create_graph=True",
        )

    return refuse


def composite(name: str, schema: str, kernel: Callable[..., Any]) -> None:
    """An operator that decomposes into others."""
    _define(name, schema, kernel, "CompositeImplicitAutograd")


def constant(name: str, schema: str, kernel: Callable[..., Any], *, shape: Callable[..., Any]) -> None:
    """An operator whose result needs no gradient, whatever its input does."""

    def cut(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(name)(*args)

    _define(name, schema, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=_library)
    _library.impl(name, cut, "Autograd")


def _define(name: str, schema: str, kernel: Callable[..., Any], key: str) -> None:
    _library.define(name + schema, tags=_tags)
    _library.impl(name, kernel, key)
