"""Layers of PyTorch Geometric compute on two ranks, split wherever they can be, what they compute alone."""

from __future__ import annotations

import pytest

from tests.proof.graph_layers import convolutions, is_right, judge, poolings

pytest.importorskip("torch_geometric.nn")
KNOWN = convolutions() | poolings()
PARTLY = {  # what needs all vertices or edges in one place, or has no rule yet
    "GATConv, edge features": "gathered: cat",  # loops join edges
    "GATv2Conv, edge features": "gathered: cat",
    "GCNConv, weights": "gathered: cat, index_put",  # loops join edges, and may be there twice
    "PDNConv": "gathered: cat, index_put",
    "HGTConv": "gathered: tensor_split",
    "MFConv": "gathered: pick, place",  # of one vertex
    "PPFConv": "gathered: cross",
    "SAGEConv, median": "gathered: sort",
    "SuperGATConv": "refused",  # draws edges by Python's random
    "TopKPooling": "refused",  # keeps vertices by their values
}


@pytest.mark.parametrize("name", ["RGCNConv", "ARMAConv", "SAGEConv, mul"])
def test_layers_are_split_by_vertices_and_edges(name: str) -> None:
    judgement = judge(KNOWN[name])
    assert judgement.word == "split" and is_right(judgement)


@pytest.mark.long
@pytest.mark.parametrize("name", KNOWN)
def test_every_layer_is_split_or_said_not_to_be(name: str) -> None:
    judgement = judge(KNOWN[name])
    assert is_right(judgement) and judgement.word == PARTLY.get(name, "split"), judgement
