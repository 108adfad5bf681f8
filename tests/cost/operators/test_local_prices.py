"""Where an operator is one local call, it costs the same by whatever strategy, and on whatever mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import ClusterSpec, Link
from autopar.core.device_groups import DeviceGroup, GroupLink
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.calls import read_calls
from autopar.cost.operators.known_prices import PriceCache
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, strategies_of
from autopar.trace.export import trace
from tests.solve.brute_force import GRAPHS, chain

CLUSTER = ClusterSpec(devices_per_node=4, device="v100", intra=Link(1e-6, 1e11))
CPUS = ClusterSpec(devices_per_node=4)
MESHES = (Mesh((4,)), Mesh((2, 2)), Mesh((1, 4)))
KINDS = [DeviceGroup(kind, kind, devices_per_node=2) for kind in ("v100", "h100")]
UNLIKE = ClusterSpec.of_groups(KINDS, [GroupLink(("v100", "h100"), Link(1e-6, 1e11), same_node=True)])


def prices_of(graph: Graph, mesh: Mesh, cluster: ClusterSpec = CPUS) -> Prices:
    return Prices(graph, Dims(graph, find_atoms(graph), mesh), cluster, CostModel.of(cluster, None))


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_what_other_strategies_have_taught_is_what_pricing_anew_gives(make: Callable[[], Graph]) -> None:
    graph, known = make(), PriceCache()
    for mesh in MESHES:
        learned, fresh = prices_of(graph, mesh), prices_of(graph, mesh)
        learned._known = PriceCache(known.local)
        for item in graph.operators:
            for one, other in zip(
                strategies_of(item, learned.dims), strategies_of(item, fresh.dims), strict=True
            ):
                fresh._known = PriceCache()
                assert learned.operator(item, one) == fresh.operator(item, other), (item.name, one)
                assert learned.calls(item, one) == fresh.calls(item, other)
    assert known.local and all(each.price and each.calls for each in known.local.values())


def test_meshes_share_what_local_calls_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the rows has the same shape by one axis of four devices or by two of two."""
    graph, priced = chain(), list[object]()
    plain = Prices._price
    monkeypatch.setattr(Prices, "_price", lambda *args: priced.append(args[1:]) or plain(*args))
    counts = []
    for mesh in MESHES:
        prices = prices_of(graph, mesh, CLUSTER)
        for item in graph.operators:
            for strategy in strategies_of(item, prices.dims):
                prices.operator(item, strategy)
        counts.append(len(priced))
    assert counts[0] < counts[1] == counts[2]


def test_meshes_share_what_local_calls_cost_on_each_kind_of_unlike_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What other meshes have taught is what pricing anew gives, and mostly needs no pricing."""
    graph, work, counts = chain(), Prices._work, list[int]()
    for mesh in MESHES:
        learned, fresh = (prices_of(graph, mesh, UNLIKE) for _ in range(2))
        worked = list[object]()
        monkeypatch.setattr(Prices, "_work", lambda *args, _to=worked: _to.append(args) or work(*args))
        found = [
            [learned.operator(item, each) for each in strategies_of(item, learned.dims)]
            for item in graph.operators
        ]
        counts.append(len(worked))
        for item, prices in zip(graph.operators, found, strict=True):
            for strategy, price in zip(strategies_of(item, fresh.dims), prices, strict=True):
                for each in (fresh, *fresh.by_group.values()):
                    each._known = PriceCache()
                assert price == fresh.operator(item, strategy), (mesh, item.name, strategy)
    assert counts[1] < 2 * counts[0] and counts[2] < counts[0] / 2


def nets() -> Graph:
    """Operators that are one call: products, norms, views, what saves its result, what shrinks."""
    x, embedded = torch.zeros(4, 6, 8, requires_grad=True), nn.Embedding(12, 8)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedded, self.model = embedded, model

        def forward(self, x: Tensor, tokens: Tensor, wanted: Tensor) -> Tensor:
            y = self.model(x + self.embedded(tokens))
            y = F.relu(y).softmax(-1) * y.tanh().sum(1, keepdim=True)
            return F.mse_loss(y.flatten(1), wanted)

    return trace(Net(), (x, torch.zeros(4, 6, dtype=torch.long), torch.zeros(4, 48))).graph


@pytest.mark.slow
@pytest.mark.parametrize("make", [*GRAPHS, nets], ids=lambda make: make.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_a_local_call_costs_and_holds_what_its_rule_writes(make: Callable[[], Graph], training: bool) -> None:
    graph, followed = make(), 0
    for cluster in (CPUS, CLUSTER):
        prices = replace(prices_of(graph, Mesh((2, 2)), cluster), training=training, _known=PriceCache())
        for item in graph.operators:
            for strategy in strategies_of(item, prices.dims):
                if prices._kind(item).local is not None:
                    followed += 1
                    assert prices.plain(item, strategy) == prices._price(item, strategy), item.name
                    lowered = prices._lower(item, strategy)
                    assert [call.key() for call in lowered.emitter.calls] == [
                        call.key() for call in prices.plain(item, strategy).calls
                    ]
                    emitter, values, results = lowered.emitter, lowered.values, lowered.results
                    written = read_calls(emitter, values, results, prices.device.kind)
                    assert prices.calls(item, strategy) == written
        assert followed > 2 * len(prices.known.local) > 0


def test_an_operator_that_is_no_plain_call_is_written_to_be_priced() -> None:
    graph = nets()
    prices = prices_of(graph, Mesh((2, 2)))
    views = [item for item in graph.operators if "view" in str(item.target) or "reshape" in str(item.target)]
    assert views and all(prices._kind(item).local is None for item in views)
