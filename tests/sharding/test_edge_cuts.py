"""Edges are cut where the vertices are to which they lead."""

from __future__ import annotations

import pytest
import torch

from autopar.core.graph import Graph, GraphInput, InputKind, Operator, Ref, TensorSpec
from autopar.core.mesh import Mesh
from autopar.core.placement import Layout, Shard
from autopar.sharding.atoms import MOST_EDGE_SHARES, Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.rewrites.edge_operators import PLACE

S = Shard(0)


def graph_of(index: list[int], vertices: int, kind: InputKind = InputKind.USER) -> Graph:
    """Messages of two numbers that are added up at vertices."""
    places = torch.tensor(index)
    messages = TensorSpec((len(index), 2), torch.float32, True)
    specs = {
        "messages": messages,
        "index": TensorSpec((len(index),), torch.int64),
        "sums": TensorSpec((vertices, 2), torch.float32, True),
    }
    inputs = (
        GraphInput("messages", kind, "messages", messages),
        GraphInput("index", InputKind.CONSTANT, "index", specs["index"], value=places),
    )
    placing = Operator("sums", PLACE, (Ref("messages"), Ref("index"), vertices, "sum"), {}, ("sums",))
    return Graph(inputs, (placing,), ("sums",), specs)


def rows(graph: Graph, mesh: Mesh, layout: Layout = (S,)) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The vertices and the messages of each rank."""
    dims = Dims(graph, find_atoms(graph), mesh)
    places = map(mesh.coordinate, range(mesh.num_devices))
    return [
        (dims.rows("sums", S, layout, place), dims.rows("messages", S, layout, place)) for place in places
    ]


def test_messages_are_cut_where_their_vertices_are() -> None:
    """Vertices 0 and 1 have four messages, 2 and 3 two."""
    assert rows(graph_of([0, 0, 0, 1, 3, 3], 4), Mesh((2,))) == [((0, 2), (0, 4)), ((2, 4), (4, 6))]


def test_a_rank_of_whose_vertices_none_has_messages_has_no_part_of_them() -> None:
    assert rows(graph_of([0, 0, 1, 1], 4), Mesh((2,))) == [((0, 2), (0, 4)), ((2, 4), (4, 4))]


def test_cuts_by_more_axes_are_cuts_of_those_by_fewer_where_vertices_are_few() -> None:
    """Eight messages to three vertices, on two and on four ranks."""
    graph = graph_of([0, 0, 0, 1, 1, 1, 2, 2], 3)
    assert [messages for _, messages in rows(graph, Mesh((2,)))] == [(0, 6), (6, 8)]
    found = rows(graph, Mesh((2, 2)), (S, S))
    assert [messages for _, messages in found] == [(0, 3), (3, 6), (6, 8), (8, 8)]


def test_axes_that_share_vertices_share_their_messages() -> None:
    found = rows(graph_of([0, 0, 0, 1, 2, 3, 3], 4), Mesh((2, 2)), (S, S))
    assert [messages for _, messages in found] == [(0, 3), (3, 4), (4, 5), (5, 7)]


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        ([0, 2, 1, 3], InputKind.USER),  # in no order
        ([0] * 14 + [1, 3], InputKind.PARAMETER),  # which DTensors hold as torch cuts them
    ],
)
def test_messages_are_cut_evenly_where_those_of_vertices_are_not_side_by_side(
    index: list[int], kind: InputKind
) -> None:
    (_, first), (_, second) = rows(graph_of(index, 4, kind), Mesh((2,)))
    assert (first, second) == ((0, len(index) // 2), (len(index) // 2, len(index)))


def test_a_rank_has_no_more_than_some_times_its_share_of_messages() -> None:
    """Of 21 messages on four ranks an even share is 6, of 24 as well."""
    assert MOST_EDGE_SHARES * 6 == 18
    assert rows(graph_of([0] * 18 + [1, 2, 3], 4), Mesh((4,)))[0][1] == (0, 18)
    assert rows(graph_of([0] * 21 + [1, 2, 3], 4), Mesh((4,)))[0][1] == (0, 6)
