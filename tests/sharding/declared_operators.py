"""Operators of a user's own, as tests register them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("declared::product", mutates_args=())
def product(x: Tensor, w: Tensor, scale: float) -> Tensor:
    """scale x w^T, in any number of dims."""
    return scale * (x @ w.T)


@product.register_fake
def _(x: Tensor, w: Tensor, scale: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, w, ctx.scale = inputs
    ctx.save_for_backward(x, w)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, w = ctx.saved_tensors
    rows, given = gradient.flatten(0, -2), x.flatten(0, -2)
    return ctx.scale * gradient @ w, ctx.scale * rows.T @ given, None


product.register_autograd(_gradients, setup_context=_keep)


@torch.library.custom_op("declared::biased", mutates_args=())
def biased(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """x w^T + bias."""
    return x @ w.T + bias


biased.register_fake(lambda x, w, bias: x.new_empty(len(x), len(w)))
biased.register_autograd(
    lambda ctx, gradient: (
        gradient @ ctx.saved_tensors[1],
        gradient.T @ ctx.saved_tensors[0],
        gradient.sum(0),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)


@torch.library.custom_op("declared::limited", mutates_args=())
def limited(x: Tensor) -> Tensor:
    """x, its gradient limited to 0.01: by a backward that isn't linear."""
    return x.clone()


@limited.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


limited.register_autograd(lambda ctx, gradient: gradient.clamp(-0.01, 0.01))


@torch.library.custom_op("declared::written", mutates_args=("x",))
def written(x: Tensor) -> None:
    """Writes to its argument."""
    x.add_(1)


class Net(nn.Module):
    """A product of its own between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.last(torch.relu(product(torch.relu(self.first(x)), self.weight, 0.1)))
        return seen


class Limited(nn.Module):
    """A backward that isn't linear between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.last(limited(torch.relu(self.first(x))))
        return seen
