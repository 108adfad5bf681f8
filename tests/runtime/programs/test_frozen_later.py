"""Layers that are frozen and learn again between steps: later programs take all weights where they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.pool import Pool
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
EXACT = 1e-9  # sums in another order, float64


class Block(nn.Module):
    """A gate of three layers that read the same, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.q, self.k, self.v = (nn.Linear(10, 10) for _ in range(3))
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        x = x + torch.softmax(q * k, -1) * v
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _thaws(shard_state: str) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(Block(), Block(), nn.Linear(10, 5)).double()
    x = torch.randn(12, 10, dtype=torch.float64)
    ours = autopar.parallelize(
        copy.deepcopy(theirs),
        autopar.ClusterSpec.local(2),
        (x,),
        force="batch",
        shard_state=shard_state,
        measure=False,
        quiet=True,
    )
    for frozen in ([], ["0.q.weight", "0.k.weight", "0.k.bias"], ["0.q.weight"]):
        losses = []
        for model in (ours, theirs):
            for name, weight in model.named_parameters():
                weight.requires_grad_(name not in frozen)
            optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert losses[:2] == pytest.approx(losses[2:], rel=EXACT)
    for (name, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(full_of(mine), wanted, rtol=0, atol=EXACT), name


@pytest.mark.parametrize("shard_state", ["optimizer", "weights"])
def test_layers_freeze_and_learn_again(shard_state: str, pools: Pools) -> None:
    pools(2).run(_thaws, shard_state)
