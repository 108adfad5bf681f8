"""Gradients that forward takes are traced: they, and what is learned through them, are the serial model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.trace.export import trace
from autopar.trace.target import Target

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


class Potential(nn.Module):
    """An energy for each sample, by a layer, a norm and an activation, and its derivative by the sample."""

    def __init__(self, take: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.take = take
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.last(F.silu(self.norm(self.first(x).tanh()))).squeeze(1)
            forces = self.take(energy, x)
        return (energy - 1).square().mean() + (forces - 0.5).square().mean()


def _of_sum(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def _of_mean(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy.mean(), x, create_graph=True)[0]


def _by_seeds(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad([energy], [x], [torch.ones_like(energy)], create_graph=True)[0]


def _cut_off(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy.sum(), x, retain_graph=True)[0]


def _second(energy: Tensor, x: Tensor) -> Tensor:
    first = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
    return torch.autograd.grad(first[:, 1].sum(), x, create_graph=True)[0]


TAKEN = {"sum": _of_sum, "mean": _of_mean, "seeds": _by_seeds, "cut off": _cut_off, "second": _second}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_gradients_through_layers_are_those_of_the_serial_model(take: Callable[..., Tensor]) -> None:
    target = Target(Potential(take), (X,), {}, None, "")
    request = Request(measure=False, force=Parallelism.BATCH)
    report = check(target, ClusterSpec.local(2), request, steps=2, changes=0)
    assert report.passed, report


class Adapted(nn.Module):
    """The loss of samples by weights that the gradient of another loss has moved (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5) / 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(F.linear(x, self.weight), y)
        (gradient,) = torch.autograd.grad(loss, self.weight, create_graph=True)
        return F.cross_entropy(F.linear(x, self.weight - 0.4 * gradient), y)


def test_gradients_by_parameters_are_those_of_the_whole_batch() -> None:
    target = Target(Adapted(), (X, torch.arange(4) % 3), {}, None, "")
    request = Request(measure=False, force=Parallelism.BATCH)
    report = check(target, ClusterSpec.local(2), request, steps=2, changes=0)
    assert report.passed, report


def test_what_is_taken_without_a_graph_has_no_gradient() -> None:
    graph = trace(Potential(_cut_off), (X,)).graph
    backward = next(item for item in graph.operators if item.target is torch.ops.aten.silu_backward.default)
    assert not graph.specs[backward.operands[0]].requires_grad
    assert not graph.specs[str(backward.results[0])].requires_grad


def test_layers_are_whole_where_no_gradient_is_taken() -> None:
    graph = trace(Potential(lambda energy, x: x), (X,)).graph
    assert torch.ops.aten.linear.default in {item.target for item in graph.operators}


def test_hooks_on_what_autograd_keeps_around_the_call_are_there_again() -> None:
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        trace(Potential(_of_sum), (X,))
        del packed[:]
        (X.clone().requires_grad_() * 2 * X).sum()
    assert packed
