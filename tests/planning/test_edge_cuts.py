"""A plan says how many edges of a graph lead from part to part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.planning.edge_cuts import edge_notes
from autopar.sharding.strategies import find_atoms
from autopar.trace.export import trace
from tests.trace.graph_nets import SumOfNeighbours


class Gated(nn.Module):
    """Messages that are no product: of both ends of an edge."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        return torch.zeros_like(x).index_add(0, target, torch.tanh(x[source] + x[target]))


def notes(net: nn.Module, edge_index: Tensor, vertices: int, devices: int) -> tuple[str, ...]:
    graph = trace(net, (torch.randn(vertices, 4), edge_index)).graph
    return edge_notes(graph, find_atoms(graph), devices)


@pytest.mark.parametrize("net", [SumOfNeighbours(4, 4), Gated()], ids=["product", "messages"])
def test_a_ring_in_order_crosses_once_for_each_part(net: nn.Module) -> None:
    ring = torch.stack((torch.arange(8), torch.arange(8).roll(-1)))
    (line,) = notes(net, ring, 8, 4)
    assert line == (
        "graph of 8 vertices and 8 edges: in 4 ranges of vertices 50.0% of the edges come from another, "
        "with 4 rows to exchange where a gather brings 24; the fullest has 1.00 times its share"
    )


def test_more_devices_than_vertices_with_edges_are_named() -> None:
    star = torch.stack((torch.arange(1, 8), torch.zeros(7, dtype=torch.int64)))
    (line,) = notes(Gated(), star, 8, 2)
    assert "edges lead to 1 vertices, fewer than 2 devices" in line and "use fewer devices" in line


def test_one_device_cuts_nothing() -> None:
    assert notes(Gated(), torch.tensor([[0, 1], [1, 0]]), 2, 1) == ()
