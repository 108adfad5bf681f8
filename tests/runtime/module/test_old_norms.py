"""The weight_norm and spectral_norm of torch.nn.utils, which are hooks, train as in the serial model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


class Net(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.inner, self.head = norm(nn.Linear(6, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x).tanh()).square().mean()
        return out


def make(name: str) -> Net:
    torch.manual_seed(0)
    net = Net(getattr(nn.utils, name)).double()
    net(X)  # leaves a weight with a graph
    return net


def _trained(name: str) -> None:
    theirs = make(name)
    ours: Any = ParallelModule(
        make(name), forced_compiler(Mesh((2,)), ["filter"]), describe=describe, device=torch.device("cpu")
    )
    ours.prepare(X)
    for batch, requires_grad in ((X, True), (X[:2], True), (X, False)):  # in eval mode no power iteration
        for net in (theirs, ours):
            net.train(requires_grad)
            net.zero_grad()
            net(batch).backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
    mine, full = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(full)
    assert max(float((mine[key] - full[key]).abs().max()) for key in full) < 1e-12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_a_weight_that_a_hook_makes_trains_serially(name: str, pools: Callable[[int], Pool]) -> None:
    pools(2).run(_trained, name)
