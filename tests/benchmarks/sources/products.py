"""Words that a process receives for one layer of a full-graph net, Z = A H W, forward and backward.

    n vertices, f features each way, nnz entries of A; P processes, replication c, q = P^(1/2) or P^(1/3)

    1D     2 n f + f^2                          A and H in rows
    1.5D   2 n f/c + 2 n f c/P                  rows in P/c parts, each on c processes that share its columns
    2D     8 n f/P^(1/2) + 2 nnz/P^(1/2)        blocks on a square
    3D     2 nnz/P^(2/3) + 12 n f/P^(2/3)       blocks on a cube, whose layers share the columns

Beside them, what is counted block by block: every block that a process needs and doesn't own. Two products
with A (A H forward, A G backward), and the dense ones around W: A H W, A G W' and H' A G, which in rows need
a sum of f^2 numbers alone.

Source: Tripathy, Yelick and Buluc, Reducing communication in graph neural network training, SC 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.benchmarks.sources.figures import FigureRow, FigureTable

REPLICATION = 4


@dataclass(frozen=True, slots=True)
class GraphLayer:
    """Numbers of vertices, of features of each, and of entries of the matrix, spread evenly."""

    vertices: int
    features: int
    entries: int

    @property
    def rows(self) -> int:
        """Numbers of a dense matrix, one row for each vertex."""
        return self.vertices * self.features


GRAPH = GraphLayer(1 << 20, 128, 1 << 25)


def formulas(layer: GraphLayer, size: int, replication: int) -> dict[str, float]:
    """Words by scheme, as published."""
    nf, square, two_thirds = layer.rows, math.sqrt(size), size ** (2 / 3)
    return {
        "1D": 2 * nf + layer.features**2,
        "1.5D": 2 * nf / replication + 2 * nf * replication / size,
        "2D": 8 * nf / square + 2 * layer.entries / square,
        "3D": 2 * layer.entries / two_thirds + 12 * nf / two_thirds,
    }


def counts(layer: GraphLayer, size: int, replication: int) -> dict[str, float]:
    """Words by scheme, counted over blocks, of the process that receives most."""
    square, cube = math.isqrt(size), round(size ** (1 / 3))
    found = {"1D": count_rows(layer, size, 1), "1.5D": count_rows(layer, size, replication)}
    if square**2 == size:
        found["2D"] = count_grid(layer, square, 1)
    if cube**3 == size:
        found["3D"] = count_grid(layer, cube, cube)
    return found


def count_rows(layer: GraphLayer, size: int, replication: int) -> float:
    """Words of 1D, and with replication of 1.5D: a copy's own columns of H are gathered, then copies sum."""
    parts = size // replication
    block = layer.rows / parts
    gathered = max(
        sum(block for column in range(copy, parts, replication) if column != row)
        for row in range(parts)
        for copy in range(replication)
    )
    summed = ring_words(block, replication)
    return 2 * (gathered + summed) + ring_words(layer.features**2, size)


def ring_words(numbers: float, size: int) -> float:
    """What each process receives of a sum by a ring."""
    return 2 * (size - 1) / size * numbers


def count_grid(layer: GraphLayer, side: int, layers: int) -> float:
    """Words on a grid of side x side x layers processes: 2D with one layer, 3D with as many as its side.

    In its layer a process gathers the row of A's blocks and the column of H's; partial results are
    scattered among layers. Products with W gather a row of blocks, H' A G gathers two.
    """
    size = side * side * layers
    a_block, h_block = layer.entries / size, layer.rows / size
    others = [place for place in range(side) if place != 0]
    product = sum(a_block + h_block for _ in others)
    partial = layer.rows / side**2  # of one layer, before it is scattered
    product += (layers - 1) / layers * partial
    dense = sum(h_block for _ in others)
    return 2 * product + (2 + 2) * dense


def table() -> FigureTable:
    """All schemes on 64 processes, which is a square and a cube, and on 4,096."""
    reasons = {
        "1D": "(P - 1)/P of each gather; f^2 is summed by a ring",
        "1.5D": "a sum over c copies by a ring takes 2 (c - 1)/c of its numbers, the formula counts one",
        "2D": "here each dense matrix is gathered when it is used: 6, not 8 times n f",
        "3D": "here 8, not 12 times n f",
    }
    rows = []
    for size in (64, 4096):
        published, counted = formulas(GRAPH, size, REPLICATION), counts(GRAPH, size, REPLICATION)
        for scheme, words in counted.items():
            formula = f"{published[scheme] / 1e6:.4g} M"
            rows.append(
                FigureRow(
                    f"{scheme}, P = {size:,}", formula, f"{words / 1e6:.4g} M", "the formula", reasons[scheme]
                )
            )
    title = (
        f"One graph layer, words a process receives: n = {GRAPH.vertices:,}, f = {GRAPH.features}, "
        f"nnz = {GRAPH.entries:,}, c = {REPLICATION}"
    )
    return FigureTable.of(title, "counted", rows)
