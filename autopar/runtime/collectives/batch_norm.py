"""Training batch norm whose statistics span the ranks of a group.

The operator is `torch.ops.autopar.batch_norm`. With w_r = n_r / count the share of rank r in the
elements of a channel, and mean_r, var_r (biased) its own moments, one gather of (w, mean, var) gives

    mean = sum_r w_r mean_r        var = sum_r w_r (var_r + (mean_r - mean)^2)        (Chan et al., 1979)

and y = weight xhat + bias with xhat = (x - mean) / sqrt(var + eps). Backward, one all-reduce of
sum(g) and sum(g xhat) over everybody gives

    grad_x = weight / sqrt(var + eps) (g - sum(g) / count - xhat sum(g xhat) / count)

while the gradients of weight and bias are this rank's own sums: weight and bias are Broadcast.

Passes over x on a CPU: moments and normalisation forward; backward the two sums and two affine
passes, by ATen's own kernels in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.operator_facts import declare
from autopar.runtime import registry
from autopar.runtime.collectives import groups, transport
from autopar.runtime.collectives.memory_format import dense, memory_format

Moments = tuple[Tensor, Tensor]  # mean and biased variance of each channel


def _local_moments(x: Tensor) -> Moments:
    """Moments of this rank; 16-bit inputs in float32. The fused kernel takes a quarter of var_mean's time on
    CPUs."""
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if not x.numel():  # a rank without samples has no share
        return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    if x.is_cpu:
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    return mean, var


def _moments(x: Tensor, group: str, count: int) -> Moments:
    mean, var = _local_moments(x)
    share = mean.new_full((1,), x.numel() / x.shape[1] / count)
    mine = torch.cat([share, mean, var])
    gathered = mine.new_empty(groups.size(group), len(mine))
    transport.all_gather(gathered, gathered.unbind(), mine, group)
    shares, means, variances = torch.split(gathered, [1, len(mean), len(mean)], 1)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean) ** 2)).sum(0)


def _normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Normalise x by the given moments: weight (x - mean) / sqrt(var + eps) + bias."""
    if not x.numel():  # ATen's kernels divide by the number of elements
        return torch.empty_like(x)
    return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group: str, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = dense(x)
    mean, var = _moments(x, group, count)
    scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
    return _normalise(x, scale, shift, mean, var, eps), mean, var


def _local_sums(
    gradient: Tensor, x: Tensor, scale: Tensor, mean: Tensor, var: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """sum(g xhat) and sum(g) of each channel on this rank."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    _, weight_sum, bias_sum = torch.ops.aten.native_batch_norm_backward(
        gradient, x, scale, mean, var, mean, invstd, False, eps, [False, True, True]
    )
    return weight_sum, bias_sum


def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    group: str,
    count: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; the last two are local sums."""
    x = dense(x)
    gradient = dense(gradient, memory_format(x))
    scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    invstd = torch.rsqrt(var + eps)
    weight_sum, bias_sum = _local_sums(gradient, x, scale, mean, var, invstd, eps)
    sums = torch.stack([weight_sum, bias_sum])
    transport.all_reduce(sums, groups.group(group))
    slope, offset = (-scale * invstd / count * sums).unbind()
    channels = [1, -1] + [1] * (x.dim() - 2)
    x_gradient = _normalise(x, slope, offset, mean, var, eps)
    x_gradient.addcmul_(gradient, (scale * invstd).to(gradient.dtype).view(channels))
    return x_gradient, weight_sum, bias_sum


def _shape(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of both directions: one tensor like x and two of one number for each channel."""
    wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    channel = x.new_empty(x.shape[1], dtype=wide)
    return torch.empty_like(x, memory_format=memory_format(x)), channel, torch.empty_like(channel)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, *ctx.arguments = inputs
    _, mean, var = output
    ctx.save_for_backward(x, weight, mean, var)
    ctx.mark_non_differentiable(mean, var)
    ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]


def _differentiate(ctx: Any, gradient: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    back = registry.eager("batch_norm_backward")(gradient, *ctx.saved_tensors, *ctx.arguments)
    parameters = [
        None if dtype is None else total.to(dtype) for dtype, total in zip(ctx.dtypes, back[1:], strict=True)
    ]
    return back[0], *parameters, None, None, None


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    group: str,
    count: int,
    momentum: float,
    eps: float,
) -> Tensor:
    """Batch norm as graphs call it: `count` is the number of elements of a channel over all ranks.

    The running buffers, where given, take the global moments, the variance as count / (count - 1).
    """
    y, mean, var = registry.eager("batch_norm_forward")(x, weight, bias, group, count, eps)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    return y  # type: ignore[no-any-return]


registry.functional(
    "batch_norm_forward",
    "(Tensor x, Tensor? weight, Tensor? bias, str group, int count, float eps) -> (Tensor, Tensor, Tensor)",
    _forward,
    shape=_shape,
    setup=_setup,
    backward=_differentiate,
)
registry.functional(
    "batch_norm_backward",
    "(Tensor gradient, Tensor x, Tensor? weight, Tensor mean, Tensor var, str group, int count, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    shape=_shape,
)
registry.composite(
    "batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " str group, int count, float momentum, float eps) -> Tensor",
    _batch_norm,
)


def _of_shard(args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A batch norm of the shard alone, in training, without running statistics."""
    return torch.ops.aten.batch_norm.default, (*args[:3], None, None, True, 0.1, 1e-5, False)


declare(registry.operator("batch_norm"), local_form=_of_shard)
