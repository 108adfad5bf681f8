"""A branch that clamps what isn't finite is one program, and any other branch on it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ValuesAskedError
from autopar.trace.export import trace


class Net(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(6, 4, dtype=dtype), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x)).square().sum()


def clamped(h: Tensor) -> Tensor:
    """As the encoders of DETR and its kin do."""
    if not torch.isfinite(h).all():
        most = torch.finfo(h.dtype).max - 1000
        h = torch.clamp(h, min=-most, max=most)
    return h


def infinite(h: Tensor) -> Tensor:
    """Leaves alone what is no number, whose gradient a clamp would change."""
    if h.isinf().any():
        most = torch.finfo(h.dtype).max - 1000
        h = h.clamp(-most, most)
    return h


def passes_at_the_bound() -> bool:
    """Whether the gradient of a clamp passes where its operand is the bound: in torch 2.15 it doesn't."""
    x = torch.ones(1, requires_grad=True)
    return bool(torch.autograd.grad(torch.clamp(x, -1, 1).sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_clamped_always_is_as_the_branch_has_it(dtype: torch.dtype) -> None:
    graph = trace(Net(clamped, dtype), (torch.randn(3, 6, dtype=dtype),)).graph
    (clamp,) = [item for item in graph.operators if "clamp" in str(item.target)]
    most = torch.finfo(dtype).max
    for value in (0.5, most, -most, math.inf, -math.inf, math.nan):
        x = torch.tensor([value, 1.0], dtype=dtype, requires_grad=True)
        ours, theirs = torch.clamp(x, *clamp.args[1:], **clamp.kwargs), clamped(x)
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
        if abs(value) == most and not passes_at_the_bound():
            continue
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
        assert torch.equal(*grads)


def _more(h: Tensor) -> Tensor:
    return h * 2 if not torch.isfinite(h).all() else h


def _narrower(h: Tensor) -> Tensor:
    return h.clamp(-1.0, 1.0) if not torch.isfinite(h).all() else h


def _of_another(h: Tensor) -> Tensor:
    other = h + 1
    return torch.clamp(other, -3e38, 3e38) if not torch.isfinite(h).all() else h


def _changed_since(h: Tensor) -> Tensor:
    h = h + 1
    fine = torch.isfinite(h).all()
    h.mul_(2)
    most = torch.finfo(h.dtype).max
    return h if fine else torch.clamp(h, -most, most)


def _told(h: Tensor) -> Tensor:
    total = h.sum()
    if not torch.isfinite(total).all():
        print("not finite")
    return total


@pytest.mark.parametrize("then", [infinite, _more, _narrower, _of_another, _changed_since, _told])
def test_any_other_branch_depends_on_values(then: Any) -> None:
    with pytest.raises(ValuesAskedError):
        trace(Net(then), (torch.randn(3, 6),))


def test_a_clamp_that_changes_what_is_finite_depends_on_values() -> None:
    with pytest.raises(ValuesAskedError):
        trace(Net(clamped, torch.float16), (torch.randn(3, 6, dtype=torch.float16),))
    with torch.autocast("cpu", torch.float16), pytest.raises(ValuesAskedError):
        trace(Net(clamped), (torch.randn(3, 6),))
