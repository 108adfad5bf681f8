"""Calls with a backward of the user's own: cut along the dims in which parts were seen to be independent.

y from x, w    "d0 d1, d1 -> d0 d1"     where custom_operator.CustomCall.split is ({0: 0, 1: 1}, {1: 0})

Its backward need not be linear in the gradient, so that it takes none that isn't summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.core.graph import TensorSpec
from autopar.core.strategy import UNSUMMED, Option
from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation
from autopar.sharding.rule import Instance, Rule, Sample, register
from autopar.trace.backwards.custom_operator import CUSTOM, CustomCall, call_at, place_of


@register
class CustomBackward(Rule):
    """A Function, or a hook on a tensor."""

    targets = (CUSTOM,)

    def equation(self, op: Instance) -> Equation:
        call = call_at(op["place"])
        operands = tuple(
            tuple(
                next((f"d{factor}" for factor, own in dims.items() if own == dim), None)
                for dim in range(len(op.specs[name].shape))
            )
            for name, dims in zip(op.operands, call.split, strict=True)
        )
        results = tuple(
            tuple(f"d{dim}" if dim in call.factors else None for dim in range(len(spec.shape)))
            for spec in call.results
        )
        return Equation(operands, results)

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        return [option for option in super().options(op, atoms) if option.factor != UNSUMMED]

    def samples(self) -> Iterable[Sample]:
        x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        spec = TensorSpec((5, 4), torch.float64, requires_grad=True)
        split = CustomCall("Clamped", "5x4", "sample 5x4", _clamped, (spec,), ({0: 0, 1: 1}, {1: 0}))
        whole = CustomCall("Clamped", "whole", "sample whole", _clamped, (spec,), ({}, {}))
        for call in (split, whole):
            yield Sample(CUSTOM, ([x, w], call.title, call.digest, [0.1], place_of(call)))


class _Clamped(torch.autograd.Function):
    """x * w, with gradients that are clamped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, most: float) -> torch.Tensor:
        ctx.most = most
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, w = ctx.saved_tensors
        gradient = gradient.clamp(-ctx.most, ctx.most)
        return gradient * w, (gradient * x).sum(0), None


def _clamped(operands: Sequence[torch.Tensor], numbers: Sequence[float]) -> tuple[torch.Tensor, ...]:
    apply: Any = _Clamped.apply  # ships without types
    return (apply(*operands, *numbers),)
