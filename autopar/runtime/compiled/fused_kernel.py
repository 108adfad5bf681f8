"""A group of operators as one operator, whose kernels a compiler makes: so a group is measured like a call.

    autopar.fused("a2 = aten.gelu.default(a0, approximate='none')
                   a3 = aten.mul.Tensor(a2, a1)
                   return (autopar.taken_up.default(a3, True),)", forward bytes, backward bytes, [a0, a1])

The text is Python on operands a0, a1, ...; the bytes are the group's traffic, from which estimates are made.
`taken_up` stands for the kernel that takes a result: for it the result is written, and saved for backward if
so said, and from it a gradient comes. Without it a compiler would save another thing than in a whole program:
of a ReLU a mask, which took 80 times as long to write on a CPU as what the next product keeps anyway.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.operator_facts import declare
from autopar.core.work import Flops
from autopar.runtime import registry

COMPILE_SECONDS = 6.0  # of a group, forward and backward, about: C++ compilers took 3 to 10 s, Triton less


def _run(text: str, forward: int, backward: int, operands: Sequence[Tensor]) -> list[Tensor]:
    return list(_compiled(text, len(operands))(*operands))


@functools.cache
def _compiled(text: str, count: int) -> Callable[..., Any]:
    options: dict[str, Any] = {"fallback_random": True}
    return torch.compile(function(text, count), fullgraph=True, dynamic=False, options=options)


def function(text: str, count: int) -> Callable[..., Any]:
    """Compile the text of a group into a function of `count` operands."""
    names = ", ".join(f"a{place}" for place in range(count))
    body = "\n    ".join(text.splitlines())
    scope: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
    scope |= {"aten": torch.ops.aten, "autopar": torch.ops.autopar}
    exec(f"def group({names}):\n    {body}", scope)
    made: Callable[..., Any] = scope["group"]
    return made


def _taken(y: Tensor, is_kept: bool) -> Tensor:
    return y.new_zeros(())


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, is_kept = inputs
    ctx.shape = list(y.shape)
    ctx.save_for_backward(*[y] * is_kept)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Make a gradient of arbitrary numbers, at no cost, that depends on the incoming one."""
    kept = ctx.saved_tensors
    if kept:
        return torch.ops.autopar.gradient_like.default(gradient, kept[0]), None
    return torch.ops.autopar.gradient_of.default(gradient, ctx.shape), None


def _gradient_of(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    return gradient.new_empty(shape)


def _gradient_like(gradient: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(y)


registry.define("gradient_of", "(Tensor gradient, int[] shape) -> Tensor", _gradient_of, shape=_gradient_of)
registry.define(
    "gradient_like", "(Tensor gradient, Tensor y) -> Tensor", _gradient_like, shape=_gradient_like
)
registry.functional(
    "taken_up",
    "(Tensor y, bool is_kept) -> Tensor",
    _taken,
    shape=_taken,
    setup=_save,
    backward=_gradient,
    is_local=True,
)
registry.composite("fused", "(str text, int forward, int backward, Tensor[] operands) -> Tensor[]", _run)
FUSED = registry.operator("fused")
declare(FUSED, flops=lambda _: Flops(0, 0))  # groups hold no products
