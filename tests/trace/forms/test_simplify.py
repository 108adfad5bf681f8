"""What is left out of a graph changes nothing; a copy of what is written later stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.trace.export import trace
from autopar.trace.target import Target
from costdb.database import Database

Forward = Callable[["Held", Tensor], Tensor]


class Held(nn.Module):
    """A norm with running statistics, and two buffers."""

    one: Tensor
    other: Tensor

    def __init__(self, use: Forward) -> None:
        super().__init__()
        self.layer, self.norm, self.use = nn.Linear(6, 6), nn.BatchNorm1d(6), use
        self.register_buffer("one", torch.ones(6))
        self.register_buffer("other", torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.layer(x)).square().mean()


def statistics_before(held: Held, x: Tensor) -> Tensor:
    mean = running(held).clone()
    return held.norm(x) * (mean + 1)


def copied_statistics(held: Held, x: Tensor) -> Tensor:
    held.one.copy_(running(held))
    y: Tensor = held.norm(x)
    return y


def swapped(held: Held, x: Tensor) -> Tensor:
    one, other = held.one.clone(), held.other.clone()
    held.one.copy_(other)
    held.other.copy_(one)
    return x * held.one


def old_values(held: Held, x: Tensor) -> Tensor:
    before = held.one.clone()
    held.one.add_(1)
    return x * before


def running(held: Held) -> Tensor:
    assert held.norm.running_mean is not None
    return held.norm.running_mean


@pytest.mark.parametrize("use", [statistics_before, copied_statistics, swapped, old_values])
def test_copies_of_what_is_written_hold_what_it_was(use: Forward) -> None:
    torch.manual_seed(0)
    target = Target(Held(use), (torch.randn(8, 6),), {}, None, "")
    request = Request(measure=False, alternatives=False, force=Parallelism.BATCH, mesh=Mesh((2,)))
    with Database.in_memory(autopar.__file__) as database:
        report = check(target, ClusterSpec.local(2), request, steps=3, processes=False, database=database)
    assert report.passed, str(report)


def test_other_copies_are_left_out() -> None:
    graph = trace(Held(lambda held, x: x.clone() * held.one.clone()), (torch.randn(8, 6),)).graph
    assert not [item for item in graph.operators if "clone" in str(item.target)]
