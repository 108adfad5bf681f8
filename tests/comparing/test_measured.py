"""A serial step is eager PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.comparing.measured import _serial_step
from autopar.trace.forward.autocast import Autocast
from autopar.trace.target import Target


def weighted(output: Tensor, target: Tensor, *, weight: float = 1.0) -> Tensor:
    return weight * (output - target).square().sum()


class Losing(nn.Linear):
    """A model that gives its loss itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


@pytest.mark.parametrize(
    ("model", "loss_fn", "kwargs", "loss"),
    [
        (nn.Linear, weighted, {}, lambda made, y: (made - y).square().sum()),
        (nn.Linear, weighted, {"weight": 3.0}, lambda made, y: 3 * (made - y).square().sum()),
        (nn.Linear, nn.MSELoss(), {}, lambda made, y: (made - y).square().mean()),
        (Losing, None, {}, lambda made, _: made.square().sum()),
    ],
)
def test_gradients_of_a_serial_step_are_those_of_its_loss(
    model: type[nn.Linear], loss_fn: Any, kwargs: dict[str, Any], loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    ours, x, y = model(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    args = (x, y) if loss_fn else (x,)
    _serial_step(ours, Target(ours, args, kwargs, loss_fn, ""), args, kwargs, autocast=Autocast())
    weight = ours.weight.detach().clone().requires_grad_()
    loss(x @ weight.t() + ours.bias.detach(), y).backward()
    torch.testing.assert_close(ours.weight.grad, weight.grad)
