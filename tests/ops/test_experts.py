"""Mixtures whose experts lie on several ranks are the serial ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism, Pins
from autopar.core.mesh import Mesh
from autopar.core.recompute import Recompute
from autopar.cost.operators.prices import Prices
from autopar.errors import InfeasibleError, InputError
from autopar.planning.asked.options import PLAN, Options
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.proof.operators import OneOperator, error, strategies
from autopar.sharding.rule import Sample
from autopar.sharding.strategies import dims_of, strategies_of
from autopar.trace.experts.body import PRODUCT, BodyStep, write_body
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import trace
from autopar.trace.target import Target
from costdb.database import Database
from tests.runtime.forced_compiler import ROUGH

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


class BiasedMixture(Mixture):
    """Its experts add vectors of their own, picked by sorted keys."""

    def __init__(self) -> None:
        super().__init__()
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares, chosen = self.router(rows).softmax(-1).topk(2, -1)
        keys, order = chosen.reshape(-1).sort()
        ends = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        made = torch._grouped_mm(rows[order // 2].bfloat16(), self.up.bfloat16(), ends).float()
        one, other = (made + self.up_bias[keys]).chunk(2, -1)
        gated = (nn.functional.silu(one) * other).bfloat16()
        made = torch._grouped_mm(gated, self.down.bfloat16(), ends).float() + self.down_bias[keys]
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


@pytest.mark.parametrize("way", ["experts", "own"])
def test_vectors_of_experts_lie_with_them(way: str) -> None:
    torch.manual_seed(0)
    model = BiasedMixture()
    report = proved(model, 2, pins=pinned(model, way))
    assert report.passed and ways_of(report) == {(way,)}, report


def test_samples_are_apart_where_experts_add_vectors() -> None:
    report = proved(BiasedMixture(), 2, force=Parallelism.BATCH)
    assert report.passed and report.plan.sharded_flops_share == 1, report


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


def test_compiled_programs_have_no_experts_on_several_ranks() -> None:
    """Their sizes are known before."""
    model = Mixture()
    with pytest.raises(
        InputError, match="found .'experts'. on mesh 2, of operands .*, wanted a factor or None"
    ):
        proved(model, 2, pins=pinned(model, "experts"), compile=True)
    with pytest.raises(InfeasibleError, match="no operator of a compiled program, whose sizes are fixed,"):
        proved(model, 2, force=Parallelism.EXPERTS, compile=True)


@pytest.mark.parametrize("imbalance", [0.9, 0, -1.0, float("nan"), float("inf")])
def test_an_imbalance_below_an_even_share_is_refused(imbalance: float) -> None:
    with pytest.raises(InputError, match="--imbalance: found .*, wanted 1 to"):
        Options(PLAN, imbalance=imbalance).read()


def test_a_fuller_rank_takes_longer_and_keeps_more() -> None:
    rows, keys = torch.randn(4096, 64), torch.randint(0, 8, (4096,))
    body = write_body([BodyStep(PRODUCT, (0, 1)), BodyStep(PRODUCT, (3, 2))])
    one = OneOperator(
        Sample(ROUTED_EXPERTS, ([rows], [torch.randn(8, 64, 256), torch.randn(8, 256, 64)], keys, body, []))
    )
    (item,) = one.graph.operators
    for way in ("experts", "own"):
        found = []
        for imbalance in (1.0, 1.5, 2.0):
            dims = dims_of(one.graph, Mesh((2,)), imbalance)
            prices = Prices(one.graph, dims, ClusterSpec.local(2), ROUGH)
            (strategy,) = (each for each in strategies_of(item, dims) if each[0].factor == way)
            price = prices.plain(item, strategy)
            found.append((price.seconds, price.saved.extra_bytes))
        assert found[0] < found[1] < found[2], found
        assert [nbytes for _, nbytes in found] == sorted({nbytes for _, nbytes in found}), found


def test_a_plan_says_how_full_it_takes_the_fullest_rank_to_be() -> None:
    model = Mixture()
    plan = proved(model, 2, pins=pinned(model, "own"), imbalance=1.5).plan
    assert "the fullest rank of experts is expected to run 1.5 of an even share (--imbalance)" in plan.notes


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=6, max_size=9), st.sampled_from([(2,), (3,), (2, 2)]))
def test_whatever_a_router_chooses_experts_are_serial(chosen: list[int], shape: tuple[int, ...]) -> None:
    """All rows to one expert, none to some, uneven rows and experts."""
    body = write_body([BodyStep(PRODUCT, (0, 1)), BodyStep(PRODUCT, (3, 2))])
    weights = [torch.randn(4, 3, 5), torch.randn(4, 5, 2)]
    sample = Sample(ROUTED_EXPERTS, ([torch.randn(len(chosen), 3)], weights, torch.tensor(chosen), body, []))
    for one, dims, strategy in strategies(sample, Mesh(shape)):
        factors = [option.factor for option in strategy]
        if "experts" in factors or factors == ["own"]:
            assert error(one, dims, strategy) < 1e-9, factors
