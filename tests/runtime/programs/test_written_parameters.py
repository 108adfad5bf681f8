"""Frozen parameters that forward writes, as a teacher that follows: as in serial training, on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.pool import Pool
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
EXACT = 1e-9  # sums in another order, float64
WAYS: dict[str, dict[str, Any]] = {
    "filter": {"force": "filter"},
    "shards": {"force": "batch", "shard_state": "weights"},
    "batch": {"force": "batch", "shard_state": "none"},
    "stages": {"stages": 2, "micro_batches": 2},
}


class Followed(nn.Module):
    """A net, and a teacher that follows it in training, before each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for new, old in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                old.data = old.data * 0.9 + new.data * 0.1
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.net(x), target + 1)


def _follows(way: str) -> None:
    theirs, options = Followed().double(), WAYS[way]
    x = torch.randn(8, 8, dtype=torch.float64)
    two = autopar.ClusterSpec.local(2)
    ours = autopar.parallelize(copy.deepcopy(theirs), two, (x,), measure=False, quiet=True, **options)
    optimizers = [
        torch.optim.SGD([item for item in model.parameters() if item.requires_grad], 0.5)
        for model in (ours, theirs)
    ]
    parts = x.chunk(options.get("micro_batches", 1))
    for step in range(3):
        for _ in range(2):  # gradients add up over two calls, between which nobody steps
            for part in parts:
                (theirs(part) / len(parts)).backward()
            if "stages" in options:
                ours.train_step(x)
            else:
                ours(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1 and "stages" not in options:
            for model in (ours, theirs):
                model.eval()
            with torch.no_grad():
                torch.testing.assert_close(ours(x), theirs(x), rtol=EXACT, atol=EXACT)
            for model in (ours, theirs):
                model.train()
    saved = {name: full_of(item) for name, item in ours.state_dict().items()}
    torch.testing.assert_close(saved, dict(theirs.state_dict()), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_that_forward_moves_is_the_serial_one(pools: Pools, way: str) -> None:
    pools(2).run(_follows, way, timeout=120.0)
