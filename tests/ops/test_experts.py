"""Mixtures whose experts lie on several ranks are the serial ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism, Pins
from autopar.core.mesh import Mesh
from autopar.core.recompute import Recompute
from autopar.errors import InfeasibleError
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import trace
from autopar.trace.target import Target
from costdb.database import Database

BATCH, LENGTH = 4, 5
EXPERTS, WIDTH, HIDDEN = 5, 16, 8


class Mixture(nn.Module):
    """Each row takes the shares of two of five gated experts; `bias` is what the router adds to an expert."""

    def __init__(self, bias: Tensor | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.register_buffer("bias", torch.zeros(EXPERTS) if bias is None else bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares, chosen = (self.router(rows) + self.bias).softmax(-1).topk(2, -1)
        keys, order = chosen.reshape(-1).sort()
        ends = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        one, other = torch._grouped_mm(rows[order // 2].bfloat16(), self.up.bfloat16(), ends).chunk(2, -1)
        made = torch._grouped_mm(nn.functional.silu(one) * other, self.down.bfloat16(), ends).float()
        made = made * shares.reshape(-1)[order].unsqueeze(1)
        return x + torch.zeros_like(rows).index_add(0, order // 2, made).view(x.shape)


def proved(model: nn.Module, ranks: int, **request: object) -> Report:
    torch.manual_seed(0)
    target = Target(model, (torch.randn(BATCH, LENGTH, WIDTH),), {}, lambda y: y.square().mean(), "")
    asked = Request(measure=False, alternatives=False, **request)  # type: ignore[arg-type]
    with Database.in_memory(autopar.__file__) as database:
        return check(target, ClusterSpec.local(ranks), asked, steps=2, processes=False, database=database)


def pinned(model: nn.Module, *ways: str) -> Pins:
    """The experts, pinned."""
    graph = trace(model, (torch.randn(BATCH, LENGTH, WIDTH),), {}).graph
    return {item.name: ways for item in graph.operators if item.target is ROUTED_EXPERTS}


def ways_of(report: Report) -> set[tuple[str | None, ...]]:
    return {layer.strategy for layer in report.plan.layers if "routed_experts" in layer.op}


@pytest.mark.parametrize(
    ("way", "ranks"),
    [("experts", 2), ("experts", 3), ("experts", 4), ("experts.1", 5), ("own", 2), ("own", 3), ("own", 5)],
)
def test_experts_of_several_ranks_are_serial(way: str, ranks: int) -> None:
    model = Mixture()
    report = proved(model, ranks, mesh=Mesh((ranks,)), pins=pinned(model, way))
    assert report.passed and ways_of(report) == {(way,)}, report


@pytest.mark.parametrize(
    "ways",
    [
        ["experts", "t"],
        ["t", "experts"],
        ["experts", "own"],
        ["own", "experts"],
        ["hidden", "experts"],
        ["experts", "experts"],
        ["experts.1", "experts"],
    ],
)
def test_experts_go_with_other_splits(ways: list[str]) -> None:
    model = Mixture()
    report = proved(model, 4, mesh=Mesh((2, 2)), pins=pinned(model, *ways))
    assert report.passed and ways_of(report) == {tuple(ways)}, report


@pytest.mark.parametrize("way", ["experts", "own"])
@pytest.mark.parametrize("liked", [(0,), (4,), (1, 3)])
def test_experts_without_rows_and_with_all_of_them_are_serial(liked: tuple[int, ...], way: str) -> None:
    bias = torch.zeros(EXPERTS)
    bias[list(liked)] = 100.0
    model = Mixture(bias)
    report = proved(model, 3, pins=pinned(model, way))
    assert report.passed and ways_of(report) == {(way,)}, report


@pytest.mark.parametrize("way", ["experts", "own"])
def test_experts_go_with_recomputing(way: str) -> None:
    model = Mixture()
    report = proved(model, 2, pins=pinned(model, way), recompute=Recompute.ALL)
    assert report.passed and ways_of(report) == {(way,)}, report


def test_experts_are_forced() -> None:
    report = proved(Mixture(), 4, mesh=Mesh((4,)), force=Parallelism.EXPERTS)
    assert report.passed and ways_of(report) <= {("experts",), ("own",)}, report


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(InfeasibleError, match=f"no experts dim longer than {EXPERTS}"):
        proved(Mixture(), 8, mesh=Mesh((8,)), force=Parallelism.EXPERTS)
