"""Orders of vertices say what they cut, keep the graph, and put rows back."""

from __future__ import annotations

import sys

import pytest
import torch

from autopar.errors import InputError
from autopar.sharding.vertex_order import WAYS, edge_cut, order_vertices


def cliques(count: int, size: int) -> torch.Tensor:
    """Cliques whose vertices are strewn over all numbers: vertex v is in clique v % count."""
    vertices = torch.arange(count * size)
    pairs = torch.cartesian_prod(vertices, vertices)
    return pairs[pairs[:, 0] % count == pairs[:, 1] % count].t().contiguous()


def test_a_cut_counts_edges_rows_and_the_fullest_part() -> None:
    """Parts 0 1 and 2 3: the edges 0-2 and 0-3 read one row of the first part, 3-1 one of the second."""
    cut = edge_cut(torch.tensor([0, 0, 3, 2, 3]), torch.tensor([2, 3, 1, 3, 2]), 4, 2)
    assert (cut.crossing, cut.rows, cut.fullest) == (pytest.approx(3 / 5), 2, pytest.approx(4 / 2.5))


@pytest.mark.parametrize("by", WAYS)
def test_an_order_keeps_the_graph_and_is_undone(by: str) -> None:
    if by == "metis":
        pytest.importorskip("pymetis")
    edges, rows = cliques(3, 4), torch.arange(12)
    order = order_vertices(edges, 12, 3, by=by)
    assert torch.equal(order.back(order.vertices(rows)), rows)
    assert torch.equal(order.vertices(rows)[order.edges(edges)], edges)


def test_strewn_cliques_are_put_together() -> None:
    pytest.importorskip("pymetis")
    edges = cliques(4, 6)
    assert edge_cut(edges[0], edges[1], 24, 4).crossing > 0.7
    cut = order_vertices(edges, 24, 4).cut
    assert (cut.crossing, cut.rows, cut.fullest) == (0, 0, 1)


def test_a_random_order_evens_out_what_one_part_has() -> None:
    """All edges lead to the first quarter of the vertices."""
    target = torch.arange(100).repeat(20)
    edges = torch.stack((torch.arange(2000) % 400, target))
    assert edge_cut(edges[0], target, 400, 4).fullest == 4
    assert order_vertices(edges, 400, 4, by="random").cut.fullest < 1.5


@pytest.mark.parametrize(
    ("edges", "vertices", "parts", "by", "words"),
    [
        ([[0, 5], [1, 2]], 5, 2, "random", "vertices 0 to 5 of 5"),
        ([[0, -1], [1, 2]], 5, 2, "random", "vertices -1 to 2 of 5"),
        ([[0, 1], [1, 2]], 5, 6, "random", "6 parts of 5 vertices"),
        ([[0, 1], [1, 2]], 5, 2, "size", "by='size'"),
        ([[0.5, 1], [1, 2]], 5, 2, "random", "torch.float32"),
    ],
)
def test_what_is_no_graph_is_refused(
    edges: list[list[float]], vertices: int, parts: int, by: str, words: str
) -> None:
    with pytest.raises(InputError, match="order_vertices") as refused:
        order_vertices(torch.tensor(edges), vertices, parts, by=by)
    assert words in str(refused.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(InputError, match="pip install pymetis"):
        order_vertices(cliques(2, 3), 6, 2)
