"""Products whose gradients of weights are made late: beside the exchange of the input's gradient.

    h = start_r_to_b(x)                 forward: nothing
    v = late_gradient(w)                an alias
    z = wait_r_to_b(h, x)               an alias
    y = late_linear(z, v, b)            x wᵀ + b

Autograd runs what was made last first, so backward goes

    late_linear      gradient of z; of v a promise
    wait_r_to_b      its sum over ranks starts
    late_gradient    the promise is kept: gradient of w, meanwhile
    start_r_to_b     the sum is waited for

A promise is a tensor of the weight's shape and of one element's memory, which knows how to make the gradient.
A weight has one `late_gradient` for each product that reads it, since promises can't be added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import CheckError
from autopar.runtime import registry

aten = torch.ops.aten
LATE = "late_gradient"
LINEAR, CONVOLUTION = "late_linear", "late_convolution"
# Products that may be late, with the dims of a convolution's images.
PRODUCTS = {
    aten.linear.default: None,
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
}
_KEEPS = "_autopar_makes"  # the attribute of a promise: how it is kept


def promise(like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """A tensor shaped like `like`, to be replaced by the result of `make`."""
    found = like.new_empty(()).expand(like.shape)
    setattr(found, _KEEPS, make)
    return found


def kept(gradient: Tensor) -> Tensor:
    """The late gradient that was promised; raises CheckError for another tensor, whose values may be
    anything."""
    make: Callable[[], Tensor] | None = getattr(gradient, _KEEPS, None)
    if make is None:
        raise CheckError(
            where="gradient of a weight",
            found="a sum of what is to be made late",
            wanted="one product for each late gradient",
            remedy="report this model, and leave out overlap=True",
        )
    return make()


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return kept(gradient)


def _late(x: Tensor) -> Tensor:
    apply: Any = _Late.apply  # ships without types
    found: Tensor = apply(x)
    return found


def _save(ctx: Any, inputs: Sequence[Any], _: Tensor) -> None:
    x, weight, bias, *ctx.how = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias = None if bias is None else bias.shape


def _linear_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    rows = gradient.reshape(-1, gradient.shape[-1])
    slopes: list[Tensor | None] = [None, None, None]
    if ctx.needs_input_grad[0]:
        slopes[0] = rows.mm(weight).view(x.shape)
    if ctx.needs_input_grad[1]:
        slopes[1] = promise(weight, lambda: rows.t().mm(x.reshape(-1, x.shape[-1])))
    if ctx.needs_input_grad[2]:
        slopes[2] = promise(gradient.new_empty(()).expand(ctx.bias), lambda: rows.sum(0))
    return tuple(slopes)


def _convolution_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors

    def slope(place: int) -> Tensor:
        mask = [place == each for each in range(3)]
        found: Tensor = aten.convolution_backward(gradient, x, weight, ctx.bias, *ctx.how, mask)[place]
        return found

    slopes: list[Tensor | None] = [None, None, None]
    if ctx.needs_input_grad[0]:
        slopes[0] = slope(0)
    if ctx.needs_input_grad[1]:
        slopes[1] = promise(weight, lambda: slope(1))
    if ctx.needs_input_grad[2]:
        slopes[2] = promise(gradient.new_empty(()).expand(ctx.bias), lambda: slope(2))
    return (*slopes, *(None for _ in ctx.how))


def _convolved(*arguments: Any) -> Tensor:
    found: Tensor = aten.convolution(*arguments)
    return found


registry.composite(LATE, "(Tensor(a) x) -> Tensor(a)", _late)
registry.functional(
    LINEAR,
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    F.linear,
    shape=F.linear,
    setup=_save,
    backward=_linear_back,
    is_local=True,
)
registry.functional(
    CONVOLUTION,
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, bool transposed,"
    " int[] output_padding, int groups) -> Tensor",
    _convolved,
    shape=_convolved,
    setup=_save,
    backward=_convolution_back,
    is_local=True,
)
