"""The order of a graph's vertices, which decides how many edges lead from one part to another.

    edges    0-2 1-3 0-4 ...     in parts of neighbours few rows are exchanged
    order    [0, 2, 4, 1, 3]     vertex order[k] of the user's comes k-th; at random, parts are even

A part is a range of vertices, as many in each. Those of neighbours are METIS's (Karypis and Kumar, 1998).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.core.cut import balanced
from autopar.errors import InputError

WAYS = ("metis", "random")


@dataclass(frozen=True, slots=True)
class EdgeCut:
    """Exchange between parts of a graph: the share of edges that lead to another part, the number of foreign
    rows that parts read together, and the edges into the fullest part, relative to an even share."""

    crossing: float
    rows: int
    fullest: float


@dataclass(frozen=True, slots=True, eq=False)
class VertexOrder:
    """Vertex `order[k]` of a graph comes k-th, and `position` says where each one comes."""

    order: Tensor
    position: Tensor
    cut: EdgeCut

    def vertices(self, rows: Tensor) -> Tensor:
        """Rows of the vertices in this order, of features, labels or masks."""
        return rows[self.order]

    def edges(self, edge_index: Tensor) -> Tensor:
        """Renumber edges by the new order."""
        return self.position[edge_index]

    def back(self, rows: Tensor) -> Tensor:
        """Rows of vertices in this order, as they were."""
        return rows[self.position]


def order_vertices(
    edge_index: Tensor, num_vertices: int, parts: int, *, by: str = "metis", seed: int = 0
) -> VertexOrder:
    """An order of the vertices of edges [2, E] in which ranges of them make good `parts`.

    By "metis" few edges lead from part to part, which needs pymetis; by "random" no part has many more edges
    than another. Raises InputError for edges that aren't there, and for other words.
    """
    _check(edge_index, num_vertices, parts, by)
    if by == "random":
        order = torch.randperm(num_vertices, generator=torch.Generator().manual_seed(seed))
    else:
        order = torch.argsort(_parts_of(edge_index, num_vertices, parts), stable=True)
    position = torch.argsort(order)
    source, target = position[edge_index]
    return VertexOrder(order, position, edge_cut(source, target, num_vertices, parts))


def edge_cut(source: Tensor, target: Tensor, num_vertices: int, parts: int) -> EdgeCut:
    """The cut of edges between as many ranges of vertices as there are parts."""
    bounds = torch.tensor(balanced(num_vertices, parts))[1:-1]
    there, here = (torch.bucketize(ends.contiguous(), bounds, right=True) for ends in (source, target))
    crossing = there != here
    rows = (here * num_vertices + source)[crossing].unique()
    share = max(1, len(source)) / parts
    most = int(torch.bincount(here, minlength=parts).max()) if len(here) else 0
    return EdgeCut(float(crossing.float().mean()) if len(source) else 0.0, len(rows), most / share)


def _parts_of(edge_index: Tensor, num_vertices: int, parts: int) -> Tensor:
    """The part of each vertex by METIS, of the graph without directions, loops and twins."""
    try:
        import pymetis
    except ImportError as cause:
        raise InputError(
            where="order_vertices",
            found="pymetis isn't installed",
            wanted='it, for by="metis"',
            remedy='run pip install pymetis, or say by="random"',
        ) from cause
    both = torch.cat((edge_index, edge_index.flip(0)), 1)
    both = both[:, both[0] != both[1]].unique(dim=1)
    starts = torch.searchsorted(both[0].contiguous(), torch.arange(num_vertices + 1))
    _, found = pymetis.part_graph(parts, pymetis.CSRAdjacency(starts.tolist(), both[1].tolist()))
    return torch.tensor(found)


def _check(edge_index: Tensor, num_vertices: int, parts: int, by: str) -> None:
    if (
        edge_index.dim() != 2
        or edge_index.shape[0] != 2
        or edge_index.dtype not in (torch.int64, torch.int32)
    ):
        raise _wrong(
            f"edges {edge_index.dtype}{[*edge_index.shape]}", "integers [2, edges]", "pass edge_index"
        )
    ends = (int(edge_index.min()), int(edge_index.max())) if edge_index.numel() else (0, 0)
    if not 0 <= ends[0] <= ends[1] < max(1, num_vertices):
        found = f"edges between vertices {ends[0]} to {ends[1]} of {num_vertices}"
        raise _wrong(found, "vertices that are there", "number vertices from 0, and say how many there are")
    if not 1 <= parts <= num_vertices:
        raise _wrong(f"{parts} parts of {num_vertices} vertices", "a vertex in each", "ask for fewer parts")
    if by not in WAYS:
        raise _wrong(f"by={by!r}", " or ".join(map(repr, WAYS)), "say one of them")


def _wrong(found: str, wanted: str, remedy: str) -> InputError:
    return InputError(where="order_vertices", found=found, wanted=wanted, remedy=remedy)
