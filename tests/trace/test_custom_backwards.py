"""A backward of the model's own is never lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.export import trace


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradient, None


def test_a_backward_hook_of_a_module_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model[1].register_full_backward_hook(lambda module, before, after: (before[0] / 2,))
    with pytest.raises(TraceError, match=r"1 \(Tanh\): found a backward hook"):
        trace(model, (torch.randn(2, 3),))
