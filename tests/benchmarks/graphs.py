"""What ranks send for graph nets: formulas of docs/theory/graphs.md beside what is counted.

    python -m tests.benchmarks.graphs                 simulated ranks, P = 4, 8, 9, 16, 27 and 64
    python -m tests.benchmarks.graphs --ranks 27      some numbers of ranks
    python -m tests.benchmarks.graphs --plans         which plan is chosen by width and ranks, in minutes

Graphs have N vertices: a random one, one of R-MAT's (Chakrabarti, Zhan and Faloutsos, 2004) with vertices
numbered at random, and a band, in which each vertex reads its neighbours by number: for needed rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
from autopar.sharding.vertex_order import edge_cut
from tests.ops.layer_bytes import N, layer, messages, random_edges
from tests.ops.net_bytes import BLOCKS, CUBES, ROWS_BY_FEATURES, Way, net, one_axis, rotated, weights

WIDTH = 72
WIDTHS = (16, 64, 256)
RANKS = [4, 8, 9, 16, 27, 64]
DEGREE = 8
BAND, NEEDED = "band", "needed rows"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to split layers on some ranks: elements that a rank sends, by the formula and as counted."""

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
    power = torch.randperm(N, generator=torch.Generator().manual_seed(0))[power[:, (power < N).all(0)]]
    return {"random": random_edges(), "R-MAT": power[:, power[0].argsort(stable=True)], BAND: band()}


@dataclass(frozen=True, slots=True)
class Variant:
    """A mesh, how two layers after each other are split on it, and what a rank sends for their products."""

    name: str
    mesh: Mesh
    ways: tuple[Way, Way]
    elements: tuple[float, float]


def variants(ranks: int, edges: Tensor, width: int) -> Iterator[Variant]:
    """Every way of one axis; those of two where `ranks` is a square or a product, of three where a cube."""
    whole, share, line = N * width, (ranks - 1) / ranks, Mesh((ranks,))
    needed = 2 * edge_cut(edges[1], edges[0], N, ranks).rows * width / ranks
    for name, factor, elements in (
        ("1D, i", "i", 2 * whole * share),
        ("1D transposed, j", "j", 2 * whole * share),
        ("features, f", "f", 0.0),
        (f"1D {NEEDED}, r", "r", needed),
    ):
        yield Variant(name, line, (one_axis(factor),) * 2, (elements,) * 2)
    copies = next((c for c in range(2, ranks) if ranks % c == 0 and c * c < ranks), 0)
    if copies:
        part = 4 * whole * (1 / copies - 1 / ranks), 4 * whole * (copies - 1) / ranks
        oblong = Mesh((copies, ranks // copies))
        yield Variant(f"1.5D, i j, c = {copies}", oblong, (BLOCKS, rotated(BLOCKS)), part)
    if (side := math.isqrt(ranks)) ** 2 == ranks:
        square, half = Mesh((side, side)), 2 * whole / side * (side - 1) / side
        yield Variant("2D, i f", square, (ROWS_BY_FEATURES,) * 2, (half, half))
        yield Variant("2D, i j", square, (BLOCKS, rotated(BLOCKS)), (2 * half, 2 * half))
    if (side := round(ranks ** (1 / 3))) ** 3 == ranks:
        part3 = 4 * whole / side**2 * (side - 1) / side
        yield Variant("3D, i j f", Mesh((side,) * 3), (CUBES, rotated(CUBES)), (part3, part3))


def rows_of(ranks: int, width: int = WIDTH) -> Iterator[Row]:
    """Every variant's products, of each graph, and messages along edges."""
    for graph, edges in graphs().items():
        for variant in _of(graph, variants(ranks, edges, width)):
            counted = sum(_product(variant, way, edges, width) for way in variant.ways) / 2
            yield Row(variant.name, graph, ranks, sum(variant.elements) / 2, counted)
        whole = N * width * (ranks - 1) / ranks
        needed = 2 * edge_cut(edges[1], edges[0], N, ranks).rows * width / ranks
        for name, source, target, formula in (
            ("messages, edges", "e", "e", 4 * whole),
            ("messages, vertices", "e", "r", 2 * whole),
            (f"messages, {NEEDED}", "r", "r", needed),
        ):
            if graph == BAND and NEEDED not in name:
                continue
            counted = messages(Mesh((ranks,)), source, target, edges=edges, width=width)
            yield Row(name, graph, ranks, formula, counted)


def _of(graph: str, ways: Iterable[Variant]) -> Iterator[Variant]:
    return (way for way in ways if graph != BAND or NEEDED in way.name)


def _product(variant: Variant, way: Way, edges: Tensor, width: int) -> float:
    factors = way.product.split()
    return layer(variant.mesh, factors, way.before, way.after, edges=edges, width=width)


def nets_of(ranks: int, width: int = WIDTH) -> Iterator[Row]:
    """A net of two layers by every variant, with what its weights send."""
    for graph, edges in graphs().items():
        for variant in _of(graph, variants(ranks, edges, width)):
            formula = sum(variant.elements) + weights(variant.mesh, variant.ways, width)
            counted = net(variant.mesh, variant.ways, edges, width)
            yield Row(variant.name, graph, ranks, formula, counted)


def show(title: str, rows: Iterable[Row], console: Console) -> None:
    """Formulas beside counts."""
    table = Table(*(title, "graph", "ranks", "formula, MB", "counted, MB", "counted / formula"), box=None)
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


@dataclass(frozen=True, slots=True)
class Found:
    """How a plan splits both products, and its predicted step."""

    split: str
    seconds: float


def chosen(edges: Tensor, width: int, ranks: int) -> Found:
    """The plan for ranks of one machine, by estimates."""
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
    factors = [" ".join(each.factor if each.shards else "-" for each in item) for item in products]
    return Found(f"{made.mesh}: {', '.join(factors)}", made.step_seconds)


def plans(
    numbers: list[int], widths: Sequence[int], names: Sequence[str]
) -> Iterator[tuple[str, int, list[Found]]]:
    """Plans of each graph by width and ranks."""
    for name in names:
        for width in widths:
            yield name, width, [chosen(graphs()[name], width, number) for number in numbers]


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of simulated ranks.")] = None,
    widths: Annotated[list[int] | None, typer.Option(help="Widths of plans; 16, 64 and 256.")] = None,
    graph: Annotated[list[str] | None, typer.Option(help="Graphs of plans; all three.")] = None,
    *,
    plan: Annotated[bool, typer.Option("--plans", help="Find plans by width and ranks instead.")] = False,
) -> None:
    """Print what ranks send for a layer and for a net of two, by formulas and as counted, or plans."""
    console = Console(width=140)
    if not plan:
        for number in ranks or RANKS:
            console.print(f"{N} vertices, width {WIDTH}, float32: what a rank sends on average, both ways")
            show("a layer's product", rows_of(number), console)
            show("a net of two layers", nets_of(number), console)
        return
    numbers = ranks or RANKS
    table = Table("graph", "width", *(f"{number} ranks" for number in numbers), box=None)
    for name, width, found in plans(numbers, widths or WIDTHS, graph or list(graphs())):
        table.add_row(name, str(width), *(f"{each.split}; {1e3 * each.seconds:.2f} ms" for each in found))
        console.print("   ".join((name, str(width), *(f"{each.split}" for each in found))), markup=False)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
