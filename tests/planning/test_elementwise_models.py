"""A model without products is split by the kind that is forced: then it is about all operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import verify
from autopar.errors import InfeasibleError
from autopar.trace.target import Target

TWO = autopar.ClusterSpec.local(2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh()


class Distance(nn.Module):
    """No parameters, and its own loss."""

    def forward(self, a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        return (weight * (b - a).pow(2).sum(1)).mean()


def scaled() -> Target:
    return Target(Scaled(), (torch.randn(8, 8),), {}, None, "")


def distance() -> Target:
    return Target(Distance(), (torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)), {}, None, "")


@pytest.mark.parametrize(
    ("target", "force"), [(scaled, "batch"), (scaled, "filter"), (distance, "batch"), (distance, "domain")]
)
def test_it_is_split_as_forced_and_equal(target: Callable[[], Target], force: str) -> None:
    torch.manual_seed(0)
    report = verify(target(), TWO, force=force, steps=1, changes=0)
    assert report.passed and report.plan.sharded_flops_share == 1.0
    assert "of the operators" in str(report)


def test_a_kind_that_no_operator_has_is_refused_by_name() -> None:
    with pytest.raises(InfeasibleError, match="no operator that can be split by channel"):
        verify(distance(), TWO, force="channel", steps=1, changes=0)
