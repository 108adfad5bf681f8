"""What is known of equal operators of other graphs is what pricing them anew would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import ClusterSpec, Link
from autopar.core.graph import Graph, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import B, P, R, Shard
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.known_prices import REMEMBERED_MESHES, PriceCache, known_prices
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, sign_of, strategies_of
from autopar.trace.export import trace

CLUSTER = ClusterSpec(devices_per_node=4, device="h100", intra=Link(1e-6, 1e11))
MODEL = CostModel.of(CLUSTER, None)


class Net(nn.Module):
    """Convolutions with halos; twice one of them, and a product with what is made of the input."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3, padding=1)  # on as many rows, which are cut by the strides after it
        self.first = nn.Conv2d(3, 8, 3, padding=1, stride=stride)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.second(F.relu(self.norm(self.second(self.first(self.stem(x))))))))
        x = x.flatten(2)
        return torch.linalg.multi_dot([x[0], x[0].t(), x[0]]).sum()


def graph_of(stride: int, rows: int) -> Graph:
    return trace(Net(stride), (torch.zeros(4, 3, rows, 16),)).graph


def prices_of(graph: Graph, mesh: Mesh) -> Prices:
    return Prices(graph, Dims(graph, find_atoms(graph), mesh), CLUSTER, MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh((4,)), Mesh((2, 2))])
def test_what_other_graphs_have_taught_is_what_pricing_anew_gives(mesh: Mesh) -> None:
    """Strides and rows differ, so that what looks alike is cut otherwise, and exchanges other halos."""
    for stride, rows in ((1, 16), (2, 16), (2, 18), (1, 18), (1, 16)):
        learned, fresh = (prices_of(graph_of(stride, rows), mesh) for _ in range(2))
        fresh._known = PriceCache()
        for item in learned.graph.operators:
            for one, other in zip(
                strategies_of(item, learned.dims), strategies_of(item, fresh.dims), strict=True
            ):
                assert learned.operator(item, one) == fresh.operator(item, other), (item.name, one)
        for name in learned.graph.specs:
            assert learned.kind(name) == fresh.kind(name)


def test_equal_operators_are_priced_once_for_all_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = prices_of(graph_of(1, 20), Mesh((4,)))
    first, second = (item for item in prices.graph.operators if item.module == "second")
    one, other = strategies_of(first, prices.dims), strategies_of(second, prices.dims)
    found = [prices.operator(first, each) for each in one]
    monkeypatch.setattr(Prices, "_price", None)
    again = prices_of(graph_of(1, 20), Mesh((4,)))
    assert [prices.operator(second, each) for each in other] == found
    assert [again.operator(again.graph.operators[2], each) for each in one] == found


class Scaled(nn.Module):
    """Products and convolutions with weights, and equal ones with what is made of weights or of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 6))
        self.weight = nn.Parameter(torch.ones(3, 3, 3, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.conv2d(F.conv2d(x, self.weight, padding=1), self.weight.tanh(), padding=1)
        y = y * self.scale
        return x.sum() + (y * y.tanh()).sum()


@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_asked_first_changes_no_price(backwards: bool) -> None:
    """Operators may differ by what their operands are alone: a weight, for one, is there anyhow."""
    x, y = (torch.zeros(shape, requires_grad=True) for shape in ((4, 3, 16, 16), (8, 6)))
    graph, mesh = trace(Scaled(), (x, y)).graph, Mesh((4,))
    together = prices_of(graph, mesh)
    pairs, unlike = dict[int, list[Operator]](), set[object]()
    for item in graph.operators:
        pairs.setdefault(sign_of(item, together.dims), []).append(item)
    for items in pairs.values():
        apart = [replace(prices_of(graph, mesh), _known=PriceCache()) for _ in items]
        together = replace(prices_of(graph, mesh), _known=PriceCache())
        for strategy in strategies_of(items[0], together.dims):
            asked = items[::-1] if backwards else items
            found = {item.name: together.operator(item, strategy) for item in asked}
            wanted = {each.name: own.operator(each, strategy) for each, own in zip(items, apart, strict=True)}
            assert found == wanted
            unlike |= {items[0].target} if len({each.tie for each in wanted.values()}) > 1 else set()
    assert unlike == {torch.ops.aten.mul.Tensor, torch.ops.aten.conv2d.default}


@pytest.mark.parametrize("early", [False, True])
def test_under_multipliers_prices_are_as_if_made_for_them(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(1, 16)
    plain = replace(prices_of(graph, Mesh((2, 2))), early=early)
    under = {"shown": 0.5, "credit": 0.0 if early else 0.25}
    under |= {"compute_credit": 0.25, "late_credit": 0.125, "late_shown": 0.75} if early else {}
    fresh = replace(prices_of(graph, Mesh((2, 2))), early=early, _known=PriceCache(), **under)
    offered = [(item, each) for item in graph.operators for each in strategies_of(item, plain.dims)]
    choices = ((R, P, B, Shard(0)),) * 2
    nets = [name for name, spec in graph.specs.items() if len(spec.shape) == 4]
    base = [plain.operator(*each) for each in offered], [plain.network(name, choices) for name in nets]
    wanted = [fresh.operator(*each) for each in offered], [fresh.network(name, choices) for name in nets]
    monkeypatch.setattr(Prices, "_price", None)
    found = plain.under(**under)
    operators = [found.operator(*each) for each in offered]
    assert operators == wanted[0] != base[0]
    differ = False
    for name, other, before in zip(nets, wanted[1], base[1], strict=True):
        network = found.network(name, choices)
        assert network.layouts == other.layouts
        assert network.seconds.tolist() == other.seconds.tolist()
        assert network.forward.tolist() == other.forward.tolist()
        differ |= network.seconds.tolist() != before.seconds.tolist()
    assert differ
    assert [plain.operator(*each) for each in offered] == base[0]


def test_prices_are_known_by_all_that_they_depend_on() -> None:
    first = known_prices(CLUSTER, Mesh((4,)), MODEL, training=True)
    assert known_prices(CLUSTER, Mesh((4,)), CostModel.of(CLUSTER, None), training=True) is first
    slower = replace(MODEL, device=replace(MODEL.device, launch_seconds=1.0))
    assert known_prices(CLUSTER, Mesh((2, 2)), MODEL, training=True) is not first
    assert known_prices(CLUSTER, Mesh((4,)), MODEL, training=True, among=((0,),)) is not first
    assert known_prices(CLUSTER, Mesh((4,)), MODEL, training=False) is not first
    assert known_prices(CLUSTER, Mesh((4,)), slower, training=True) is not first
    measuring = replace(MODEL, here=True)
    assert known_prices(CLUSTER, Mesh((4,)), measuring, training=True) is not known_prices(
        CLUSTER, Mesh((4,)), measuring, training=True
    )
    for size in range(REMEMBERED_MESHES):
        known_prices(CLUSTER, Mesh((size + 5,)), MODEL, training=True)
    assert known_prices(CLUSTER, Mesh((4,)), MODEL, training=True) is not first  # forgotten
