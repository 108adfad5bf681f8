"""What random values tell of a call with a custom backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.trace.backwards import stand_ins
from autopar.trace.backwards.custom_operator import Run

Backward = Callable[[Any, Tensor], Any]
SHAPE = (8, 6, 5)


def runs(forward: Callable[..., Tensor], backward: Backward) -> tuple[Run, Run]:
    """A Function with both, and its forward alone."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return forward(*tensors)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return backward(ctx.saved_tensors, gradient)

    def run(operands: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Tensor, ...]:
        return (Made.apply(*operands),)

    return run, lambda operands, numbers: (forward(*operands),)


def spec(*shape: int, requires_grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, torch.float32, requires_grad)


def same(x: Tensor) -> Tensor:
    return x.clone()


DERIVATIVES: list[tuple[Callable[..., Tensor], Backward]] = [
    (same, lambda saved, g: g),
    (lambda x: x * x.sigmoid(), lambda s, g: g * s[0].sigmoid() * (1 + s[0] * (1 - s[0].sigmoid()))),
    (lambda x: x.flip(0), lambda saved, g: g.flip(0)),
]
OTHERS: list[tuple[Callable[..., Tensor], Backward]] = [
    (same, lambda saved, g: -g),
    (torch.round, lambda saved, g: g),
    (same, lambda saved, g: g.clamp(-1, 1)),
    (same, lambda saved, g: g.clamp(-1e6, 1e6)),
    (same, lambda saved, g: g.nan_to_num(0.0)),
    (lambda x: x.clamp(min=0), lambda s, g: g * (s[0] > 0)),  # torch's is 1 at 0
    (lambda x: x.detach() * 2, lambda saved, g: 2 * g),
    (lambda x: x.detach() * 2, lambda saved, g: torch.zeros_like(g)),  # a gradient that is zero isn't none
]


@pytest.mark.parametrize(("forward", "backward"), DERIVATIVES)
def test_derivatives_are_known(forward: Callable[..., Tensor], backward: Backward) -> None:
    assert stand_ins.is_derivative(*runs(forward, backward), [spec(*SHAPE)], [])


@pytest.mark.parametrize(("forward", "backward"), OTHERS)
def test_what_differs_anywhere_is_no_derivative(forward: Callable[..., Tensor], backward: Backward) -> None:
    assert not stand_ins.is_derivative(*runs(forward, backward), [spec(*SHAPE)], [])


def _unless_cut_twice(x: Tensor) -> Tensor:
    return x * 2 if len(x) == 8 or x.shape[1] == 6 else x


def _norm(x: Tensor, bound: float) -> Tensor:
    return x * (bound / x.norm()).clamp(max=1.0)


CUTS: list[tuple[Callable[..., Tensor], Backward, set[int]]] = [
    (same, lambda saved, g: -g, {0, 1, 2}),
    (torch.round, lambda saved, g: g, {0, 1, 2}),
    (same, lambda saved, g: g / g.flatten(1).norm(dim=1).view(-1, 1, 1), {0}),
    (lambda x: x.cumsum(1), lambda saved, g: g, {0, 2}),
    (lambda x: x / x.abs().amax(), lambda saved, g: g, set()),
    (same, lambda saved, g: g / len(g), {1, 2}),
    (same, lambda saved, g: g + g.mean(), set()),
    (same, lambda saved, g: _norm(g, 1.0), set()),
    (same, lambda saved, g: _norm(g, 1e5), set()),
    (same, lambda saved, g: _norm(g, 1e30), set()),
    (lambda x: _norm(x, 1e30), lambda saved, g: g, set()),
    (same, lambda saved, g: g * torch.arange(8).view(8, 1, 1), {1, 2}),
    (lambda x: x * (1 + torch.arange(5)), lambda saved, g: g, {0, 1}),
    (same, lambda saved, g: g * (saved[0].mean(0) > 0), {1, 2}),
    (_unless_cut_twice, lambda saved, g: g, {0}),
]


@pytest.mark.parametrize(("forward", "backward", "dims"), CUTS)
def test_only_what_parts_know_by_themselves_is_cut(
    forward: Callable[..., Tensor], backward: Backward, dims: set[int]
) -> None:
    (split,) = stand_ins.cuts(runs(forward, backward)[0], [spec(*SHAPE)], [])
    assert split == {dim: dim for dim in dims}


def test_gradients_of_what_is_not_cut_must_add_up() -> None:
    def weigh(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    adding = runs(weigh, lambda s, g: (-g * s[1], (g * s[0]).sum(0)))[0]
    once = runs(weigh, lambda s, g: (-g * s[1], torch.ones_like(s[1])))[0]
    operands = [spec(8, 6), spec(6)]
    assert stand_ins.cuts(adding, operands, []) == ({0: 0, 1: 1}, {1: 0})
    assert stand_ins.cuts(once, operands, []) == ({1: 1}, {1: 0})


def test_large_operands_are_made_shorter_alike() -> None:
    run, _ = runs(lambda x, w: x * w, lambda s, g: (g, (g * s[0]).sum((0, 1))))
    behavior = stand_ins.observe(run, [spec(64, 512, 1024), spec(1024)], [])
    assert behavior.results == (spec(64, 512, 1024),)
    assert behavior.operands is not None
    (first, second) = (item.shape for item in behavior.operands)
    assert first[2:] == second and first[0] * first[1] * first[2] <= stand_ins.MOST_ELEMENTS


def test_what_reads_values_or_draws_is_told() -> None:
    operands = [spec(*SHAPE)]
    reading = runs(same, lambda saved, g: g if g.sum() > 0 else -g)[0]
    drawing = runs(lambda x: x + torch.rand(()), lambda saved, g: g)[0]
    assert stand_ins.observe(reading, operands, []).reads_values
    assert stand_ins.observe(drawing, operands, []).draws
    plain = stand_ins.observe(runs(same, lambda saved, g: g)[0], operands, [])
    assert not plain.reads_values and not plain.draws
    noisy = runs(same, lambda saved, g: g * torch.rand(()))[0]
    assert stand_ins.observe(noisy, operands, []).draws_backward
    assert not stand_ins.observe(drawing, operands, []).draws_backward
