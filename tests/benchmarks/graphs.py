"""What ranks send for a layer of a graph net: formulas of docs/theory/graphs.md beside what is counted.

    python -m tests.benchmarks.graphs                 simulated ranks, P = 4, 8 and 16
    python -m tests.benchmarks.graphs --ranks 27      other numbers of ranks; cubes in three dims as well
    python -m tests.benchmarks.graphs --plans         which plan is chosen by width and ranks, too

Graphs have N vertices: a random one, one of R-MAT's (Chakrabarti, Zhan and Faloutsos, 2004), and a band, in
which each vertex reads its neighbours by number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.mesh import Mesh
from autopar.core.placement import B, Shard
from autopar.sharding.vertex_order import edge_cut
from tests.ops.layer_bytes import N, layer, messages, random_edges

WIDTH = 240
WIDTHS = (16, 64, 256)
DEGREE = 8
S0, S1 = Shard(0), Shard(1)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to split a layer on some ranks: elements that a rank sends, by the formula and as counted."""

    name: str
    graph: str
    ranks: int
    formula: float
    counted: float


def rmat(scale: int, degree: int = DEGREE) -> Tensor:
    """Edges [2, E] among 2^scale vertices, each bit of their ends with odds 0.57, 0.19, 0.19 and 0.05."""
    generator = torch.Generator().manual_seed(0)
    odds = torch.tensor((0.57, 0.19, 0.19, 0.05))
    ends = torch.zeros(2, degree << scale, dtype=torch.int64)
    for _ in range(scale):
        drawn = torch.multinomial(odds, ends.shape[1], replacement=True, generator=generator)
        ends = 2 * ends + torch.stack((drawn // 2, drawn % 2))
    return ends


def band(reach: int = 3) -> Tensor:
    """Rows, and the columns that each reads: those up to `reach` away."""
    offsets = torch.arange(-reach, reach + 1)
    rows = torch.arange(N).repeat_interleave(len(offsets))
    return torch.stack((rows, (rows + offsets.repeat(N)).clamp(0, N - 1)))


def graphs() -> dict[str, Tensor]:
    """Rows, which rise, and columns."""
    power = rmat(math.ceil(math.log2(N)))
    power = power[:, (power < N).all(0)]
    return {"random": random_edges(), "R-MAT": power[:, power[0].argsort(stable=True)], "band": band()}


def rows_of(ranks: int) -> Iterator[Row]:
    """Every way of one axis; those of two where the number of ranks is a square, of three where a cube."""
    whole, share = N * WIDTH, (ranks - 1) / ranks
    mesh, random = Mesh((ranks,)), random_edges()
    for name, factor, at, formula in (
        ("1D, i", "i", S0, 2 * whole * share),
        ("1D transposed, j", "j", S0, 2 * whole * share),
        ("features, f", "f", S1, 0.0),
    ):
        yield Row(name, "random", ranks, formula, layer(mesh, [factor], (at,), (at,), width=WIDTH))
    for graph, edges in graphs().items():
        cut = edge_cut(edges[1], edges[0], N, ranks)
        formula = 2 * cut.rows * WIDTH / ranks
        counted = layer(mesh, ["r"], (S0,), (S0,), edges=edges, width=WIDTH)
        yield Row("1D needed rows, r", graph, ranks, formula, counted)
    for name, source, target, formula in (
        ("messages, edges", "e", "e", 4 * whole * share),
        ("messages, vertices", "e", "r", 2 * whole * share),
        (
            "messages, needed rows",
            "r",
            "r",
            2 * edge_cut(random[1], random[0], N, ranks).rows * WIDTH / ranks,
        ),
    ):
        yield Row(name, "random", ranks, formula, messages(mesh, source, target, edges=random, width=WIDTH))
    side = math.isqrt(ranks)
    if side * side == ranks:
        square, part = Mesh((side, side)), whole / side * (side - 1) / side
        yield Row(
            "2D, i j", "random", ranks, 4 * part, layer(square, ["i", "j"], (B, S0), (S0, B), width=WIDTH)
        )
        yield Row(
            "2D, i f", "random", ranks, 2 * part, layer(square, ["i", "f"], (S0, S1), (S0, S1), width=WIDTH)
        )
    side = round(ranks ** (1 / 3))
    if side**3 == ranks:
        cube, part = Mesh((side,) * 3), whole / side**2 * (side - 1) / side
        before, after = (B, S0, S1), (S0, B, S1)  # roles of the first two rotate
        counted = layer(cube, ["i", "j", "f"], before, after, width=WIDTH)
        yield Row("3D, i j f", "random", ranks, 4 * part, counted)


def show(rows: list[Row], console: Console) -> None:
    """Formulas beside counts."""
    table = Table(*("layer", "graph", "ranks", "formula, MB", "counted, MB", "counted / formula"), box=None)
    for row in rows:
        ratio = f"{row.counted / row.formula:.4f}" if row.formula else "-"
        sizes = (f"{4 * elements / 1e6:.3f}" for elements in (row.formula, row.counted))
        table.add_row(row.name, row.graph, str(row.ranks), *sizes, ratio)
    console.print(table)


class Net(nn.Module):
    """Two layers of a graph that the model holds."""

    adjacency: Tensor

    def __init__(self, edges: Tensor, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        made = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (N, N)).coalesce()
        self.register_buffer("adjacency", made)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(torch.sparse.mm(self.adjacency, self.first(x)))
        out: Tensor = torch.sparse.mm(self.adjacency, self.last(x))
        return out


def chosen(edges: Tensor, width: int, ranks: int) -> str:
    """How the plan splits both products, by estimates."""
    inputs = torch.randn(N, width), torch.randint(0, width, (N,))
    made = autopar.plan(
        Net(edges, width),
        ClusterSpec.local(ranks),
        inputs,
        loss_fn=F.cross_entropy,
        measure=False,
        stages=1,
        micro_batches=1,
    )
    products = (made.program.strategies[name] for name in ("product", "product_1"))
    factors = ["x".join(each.factor if each.shards else "-" for each in item) for item in products]
    return f"{made.mesh}: {', '.join(factors)}"


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of simulated ranks.")] = None,
    plans: Annotated[bool, typer.Option(help="Find plans by width and ranks as well.")] = False,
) -> None:
    """Print what ranks send for a layer of a graph net, by formulas and as counted."""
    console, numbers = Console(width=120), ranks or [4, 8, 16]
    console.print(f"{N} vertices, width {WIDTH}, float32: what a rank sends on average, forward and backward")
    show([row for number in numbers for row in rows_of(number)], console)
    if not plans:
        return
    table = Table("graph", "width", *(f"{number} ranks" for number in numbers), box=None)
    for graph, edges in graphs().items():
        for width in WIDTHS:
            table.add_row(graph, str(width), *(chosen(edges, width, number) for number in numbers))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
