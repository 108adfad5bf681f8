"""Where an operator is one local call, it costs the same by whatever strategy, and on whatever mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.cluster import ClusterSpec, Link
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.known_prices import Known
from autopar.cost.operators.prices import Prices
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, strategies_of
from tests.solve.brute_force import GRAPHS, chain

CLUSTER = ClusterSpec(devices_per_node=4, device="v100", intra=Link(1e-6, 1e11))
CPUS = ClusterSpec(devices_per_node=4)
MESHES = (Mesh((4,)), Mesh((2, 2)), Mesh((1, 4)))


def prices_of(graph: Graph, mesh: Mesh, cluster: ClusterSpec = CPUS) -> Prices:
    return Prices(graph, Dims(graph, find_atoms(graph), mesh), cluster, CostModel.of(cluster, None))


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_what_other_strategies_have_taught_is_what_pricing_anew_gives(make: Callable[[], Graph]) -> None:
    graph, known = make(), Known()
    for mesh in MESHES:
        learned, fresh = prices_of(graph, mesh), prices_of(graph, mesh)
        learned._known = Known(known.local, known.calls)
        for item in graph.operators:
            for one, other in zip(
                strategies_of(item, learned.dims), strategies_of(item, fresh.dims), strict=True
            ):
                fresh._known = Known()
                assert learned.operator(item, one) == fresh.operator(item, other), (item.name, one)
                assert learned.calls(item, one) == fresh.calls(item, other)
    assert known.local and known.calls


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
