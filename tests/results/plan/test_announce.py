"""What a plan notes is told on rank 0, once, and not where the script asks for quiet."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.cluster import ClusterSpec
from tests.pool import Pool


class Counting(nn.Module):
    """A forward that changes a number, which its plan notes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            scale = torch.distributions.Normal(0.0, 1.0).log_prob(x)
        return (self.linear(x) * scale).square().mean()


def told(quiet: bool) -> list[str]:
    torch.manual_seed(0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        parallel = parallelize(
            Counting(), ClusterSpec.local(2), (torch.randn(4, 4),), force="batch", measure=False, quiet=quiet
        )
        for length in (4, 6, 4):
            parallel(torch.randn(length, 4))
        with torch.no_grad():
            parallel(torch.randn(4, 4))
    return [line for line in said.getvalue().splitlines() if line.startswith("autopar: ")]


def test_rank_0_tells_each_note_once(pools: Callable[[int], Pool]) -> None:
    first, second = pools(2).run(told, False)
    assert len(first) == len(set(first)) and second == []
    assert sum("checks of values in Normal" in line for line in first) == 1


def test_quiet_tells_nothing(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(told, True) == [[], []]
