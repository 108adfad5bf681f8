"""Targets whose backwards aren't, or are, the derivatives of their forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Made: TypeAlias = tuple[nn.Module, tuple[Tensor, ...]]


class Flip(torch.autograd.Function):
    """Reverses and scales the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradient, None


class Round(torch.autograd.Function):
    """Straight through, where |x| is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float, most: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = step * most
        return (x / step).round().clamp(-most, most) * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= ctx.bound), None, None


class Spike(torch.autograd.Function):
    """A step whose slope is that of a fast sigmoid."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + 10 * x.abs()) ** 2


class AuxiliaryLoss(torch.autograd.Function):
    """Hands on `x`, and adds `loss` to whatever the loss is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.dtype, device=gradient.device)


class ClampedLinear(torch.autograd.Function):
    """A product of two tensors and a weight, all of whose gradients are clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        return (x * gate) @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        gradient = gradient.clamp(-0.01, 0.01)
        inner = gradient @ weight
        of_weight = gradient.t() @ (x * gate) if ctx.needs_input_grad[2] else None
        return inner * gate, inner * x, of_weight


class LayerNorm(torch.autograd.Function):
    """Its backward is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        scale = torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps)
        normal = (x - mean) * scale
        ctx.save_for_backward(normal, scale, weight)
        return normal * weight + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        outer = tuple(range(gradient.dim() - 1))
        inner = gradient * weight
        mean = inner.mean(-1, keepdim=True)
        along = (inner * normal).mean(-1, keepdim=True)
        return (
            (inner - mean - normal * along) * scale,
            (gradient * normal).sum(outer),
            gradient.sum(outer),
            None,
        )


class Top(torch.autograd.Function):
    """Two results, of which the second has no gradient, and a third that is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = x.abs().amax(1, keepdim=True)
        ctx.mark_non_differentiable(scale)
        return x / 2, scale, None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, unused: Tensor, nothing: None) -> Tensor:
        return 3 * gradient


class Normed(torch.autograd.Function):
    """Gradients of length 1 over the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm().clamp(min=1e-3)


class Scaled(torch.autograd.Function):
    """What a list holds gets no gradient, nor does its scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: list[Tensor]) -> Tensor:
        ctx.scales = scales
        return x * scales[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / 2 + 0 * ctx.scales[0], None


class ScaledAlike(Scaled):
    """Its backward is the derivative by what isn't in the list."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scales[0], None


class ScaledByNet(Scaled):
    """What a module holds gets no gradient, either."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Any) -> Tensor:
        return x * net.scale


class Bernoulli(torch.autograd.Function):
    """Noise forward, straight through backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.bernoulli(x.sigmoid())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_flip = Flip.apply  # kept aside, as is usual


class Net(nn.Module):
    """A body, something between, a head and its loss."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale, self.shift = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))
        self.square = nn.Parameter(torch.randn(8, 8))
        self.between = between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.between(self, self.body(x).tanh())), y)


def made(between: Callable[[Net, Tensor], Tensor]) -> Made:
    torch.manual_seed(0)
    return Net(between), (torch.randn(8, 6), torch.randint(3, (8,)))


def flip() -> Made:
    return made(lambda net, h: h + _flip(h, 0.7) + _flip(h * 2, 0.1))


def quantized() -> Made:
    return made(lambda net, h: Round.apply(h, 0.25, 3) @ Round.apply(net.square, 0.5, 1))


def spiking() -> Made:
    def steps(net: Net, h: Tensor) -> Tensor:
        state = torch.zeros_like(h)
        total = torch.zeros_like(h)
        for _ in range(3):
            state = 0.5 * state + h
            spike = Spike.apply(state - 0.2)
            state, total = state - spike, total + spike
        return total

    return made(steps)


def auxiliary() -> Made:
    return made(lambda net, h: AuxiliaryLoss.apply(h, h.square().mean() + net.scale.sum()))


def clamped() -> Made:
    return made(lambda net, h: ClampedLinear.apply(h, h.sigmoid() * net.scale, net.square))


def layer_norm() -> Made:
    return made(lambda net, h: LayerNorm.apply(h, net.scale, net.shift, 1e-5))


def several_results() -> Made:
    def use(net: Net, h: Tensor) -> Tensor:
        x, scale, nothing = Top.apply(h)
        assert nothing is None
        return x * scale

    return made(use)


def normed() -> Made:
    return made(lambda net, h: Normed.apply(h) * 2)


def listed() -> Made:
    return made(lambda net, h: Scaled.apply(h, [net.scale]))


def listed_alike() -> Made:
    return made(lambda net, h: ScaledAlike.apply(h, [net.scale]) + h * net.shift)


def only_held() -> Made:
    return made(lambda net, h: h * ScaledByNet.apply(h.detach(), net) + net.shift)


def noisy() -> Made:
    return made(lambda net, h: functional.dropout(Bernoulli.apply(h), 0.3))


def checkpointed() -> Made:
    def block(h: Tensor) -> Tensor:
        return Round.apply(h.exp(), 0.25, 3).tanh()

    def both(net: Net, h: Tensor) -> Tensor:
        h = checkpoint(block, h, use_reentrant=False)
        return checkpoint(lambda h: Flip.apply(h @ net.square, 0.3), h, use_reentrant=True)

    return made(both)


def hooked() -> Made:
    """Two hooks, one after the other, also for what was computed before them; a slice that is written."""

    def use(net: Net, h: Tensor) -> Tensor:
        before = h.sin()
        h.register_hook(lambda gradient: gradient.clamp(-0.02, 0.01))
        h.register_hook(lambda gradient: 3 * gradient)
        h = h * 2
        part = h[:, 2:5]
        h.register_hook(lambda gradient: gradient / 2 if True else None)
        part += 1
        return before + h

    return made(use)


def hooked_itself() -> Made:
    """Calls that give their operand back: a hook on what they give is one on the operand."""

    def use(net: Net, h: Tensor) -> Tensor:
        same = functional.dropout(h.contiguous(), 0.5, training=False)
        same.register_hook(lambda gradient: gradient.clamp(max=0.01))
        other = h.t().contiguous()
        other.register_hook(lambda gradient: 2 * gradient)
        return h + same.sin() + other.t()

    return made(use)


def hooked_by_norm() -> Made:
    def use(net: Net, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient * (0.01 / gradient.norm()).clamp(max=1.0))
        return h

    return made(use)


def without_gradients() -> Made:
    def use(net: Net, h: Tensor) -> Tensor:
        with torch.no_grad():
            target = Flip.apply(Round.apply(h, 0.5, 2), 0.5)
        return h * target

    return made(use)
