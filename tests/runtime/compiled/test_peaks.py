"""Compiled steps take no more memory than their plans promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.comparing.measured_peak import grown_bytes
from autopar.runtime.parameters.parameters import local
from tests.pool import Pool

ROWS, WIDTH = 512, 256
SECONDS = 600.0  # for a C++ compiler on a busy machine


def _grown() -> int:
    x = torch.ones(1000)

    def step() -> None:
        y = x + 1
        z = y + 1
        del y
        (z + 1).sum()

    return grown_bytes(step)


def test_what_is_allocated_at_once_is_counted() -> None:
    assert 2 * 4000 <= _grown() < 3 * 4000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))) * 0.5)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), Block()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.other(self.one(x)), y)


def _peaks() -> tuple[int, int]:
    """Bytes that the plan of this process's share predicts, and those of a real step."""
    torch.manual_seed(0)
    x, y = torch.randn(2 * ROWS, WIDTH), torch.randn(2 * ROWS, WIDTH)
    parallel = autopar.parallelize(
        Net(),
        ClusterSpec.local(2),
        (x, y),
        optimizer="sgd",
        measure=False,
        force="batch",
        compile=True,
        quiet=True,
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        parallel(x, y).backward()
        optimizer.step()

    for _ in range(2):
        step()
    optimizer.zero_grad()
    there = [x, y, *map(local, parallel.parameters())]
    assert parallel.plan is not None
    return parallel.plan.peak_bytes, grown_bytes(step) + sum(item.nbytes for item in there)


@pytest.mark.long
def test_a_compiled_step_keeps_to_its_predicted_peak(pools: Callable[[int], Pool]) -> None:
    for predicted, measured in pools(2).run(_peaks, timeout=SECONDS):
        assert 0.6 * predicted <= measured <= 1.02 * predicted, (predicted, measured)
