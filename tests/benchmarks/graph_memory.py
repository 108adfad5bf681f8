"""Peak bytes of a rank that trains a deep graph net, predicted and measured, by ways to split it and ranks.

    python -m tests.benchmarks.graph_memory                         P = 4, 8, 9, 16 and 27, in minutes
    python -m tests.benchmarks.graph_memory --ranks 4 --ranks 16    some numbers of ranks
    python -m tests.benchmarks.graph_memory --layers 16             a deeper net

Vertices have features that learn, so that these, too, are cut. Every rank is a process; the storages of its
tensors are counted in a step (`autopar/comparing/measured_peak.py`), the fullest rank's are shown. Now and
then a thread of gloo's holds what it has sent for a moment longer, so the least of `TIMES` steps counts. The
formula is that of docs/theory/graphs.md. `P x` says what P ranks take of what one takes: of all, and without
what lies whole on each rank, the graph and the labels.
"""

from __future__ import annotations

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
from autopar.comparing.measured import Contest, ContestJob
from autopar.comparing.measured_peak import peak_bytes
from autopar.planning.asked.options import Options
from autopar.planning.asked.request import Request, request_of
from autopar.results.comparison.comparison import Row
from autopar.results.plan.plan import Plan
from autopar.trace.target import Target
from tests.pool import Pool

VERTICES, WIDTH, DEGREE, REACH = 15120, 72, 8, 4  # numbers that 16 and 27 ranks divide
TIMEOUT = 300.0  # seconds for a case
BLOCK = 16  # bytes of an entry: its column, its row, and its value in the order of either
TIMES = 3


class Net(nn.Module):
    """Layers of vertices whose features learn, on a graph that the model holds."""

    adjacency: Tensor

    def __init__(self, edges: Tensor, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x = nn.Parameter(torch.randn(VERTICES, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        values = torch.full((edges.shape[1],), 1 / DEGREE)
        made = torch.sparse_coo_tensor(edges, values, (VERTICES, VERTICES), check_invariants=False)
        self.register_buffer("adjacency", made.coalesce())

    def forward(self, labels: Tensor) -> Tensor:
        x: Tensor = self.x
        for layer in self.layers:
            x = torch.tanh(torch.sparse.mm(self.adjacency, layer(x)))
        return F.cross_entropy(x, labels)


def random_edges() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VERTICES, (2, DEGREE * VERTICES), generator=generator)


def band() -> Tensor:
    """Every vertex reads those whose number is near."""
    offsets = torch.arange(-REACH, REACH + 1)
    rows = torch.arange(VERTICES).repeat_interleave(len(offsets))
    return torch.stack((rows, (rows + offsets.repeat(VERTICES)).clamp(0, VERTICES - 1)))


@dataclass(frozen=True, slots=True)
class Way:
    """A way to split layers: their factors on each of as many axes.

    Of P ranks `gathered` are the parts, P to this power, that one product gathers or adds up; `entries` those
    of the graph's block, `weight` those of a weight. `copies` are made whole on the way between two splits.
    """

    graph: str
    linear: str
    product: str
    tanh: str
    gathered: float = 0
    entries: float = 1
    weight: float = 0
    copies: bool = False

    @property
    def axes(self) -> int:
        return len(self.product.split())

    def pins(self, layers: int) -> dict[str, list[str]]:
        factors = {"linear": self.linear, "product": self.product, "tanh": self.tanh}
        found = {
            f"{name}_{number}" if number else name: text.split()
            for number in range(layers)
            for name, text in factors.items()
        }
        return found | {"cross_entropy_loss": ["d0"] * self.axes}

    def formula(self, ranks: int, layers: int, entries: int) -> float:
        """Bytes at the peak: see docs/theory/graphs.md."""
        part = 4 * VERTICES * WIDTH
        gathered = float(ranks) ** -self.gathered
        if self.copies:
            gathered += gathered * float(ranks) ** (-1 / self.axes) - 1 / ranks
        tensors = (layers + 1) / ranks + max(3 / ranks, gathered)
        block = BLOCK * entries / float(ranks) ** self.entries
        weights = 4 * layers * WIDTH * WIDTH / float(ranks) ** self.weight
        nbytes: float = part * tensors + block + weights + whole_bytes(entries)
        return nbytes


def whole_bytes(entries: int) -> int:
    """What lies whole on each rank: the matrix in COO form, and labels."""
    return 20 * entries + 8 * VERTICES


SERIAL, SERIAL_BAND = "one rank", "one rank, band"
WAYS = {
    SERIAL: Way("random", "", "", ""),
    SERIAL_BAND: Way("band", "", "", ""),
    "1D, needed rows": Way("band", "n0", "r", "d0", gathered=1),
    "1D, gathered": Way("random", "n0", "i", "d0"),
    "2D, i f": Way("random", "n0 i", "i f", "d0 d1", gathered=1 / 2, entries=1 / 2, weight=1 / 2),
    "2D, i j": Way("random", "n0 n0", "i j", "d0 d0", copies=True),
    "3D, i j f": Way(
        "random",
        "n0 n0 i",
        "i j f",
        "d0 d0 d1",
        gathered=1 / 3,
        entries=2 / 3,
        weight=1 / 3,
        copies=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A way, and how many ranks take it."""

    way: str
    ranks: int
    layers: int

    @property
    def target(self) -> Target:
        labels = torch.arange(VERTICES) % WIDTH
        return Target(Net(self.edges, self.layers), (labels,), {}, None, self.way)

    @property
    def edges(self) -> Tensor:
        return band() if WAYS[self.way].graph == "band" else random_edges()

    @property
    def entries(self) -> int:
        return int((self.edges[0] * VERTICES + self.edges[1]).unique().numel())

    @property
    def formula(self) -> float:
        return WAYS[self.way].formula(self.ranks, self.layers, self.entries)

    @property
    def cluster(self) -> ClusterSpec:
        return ClusterSpec.local(self.ranks)

    @property
    def request(self) -> Request:
        way = WAYS[self.way]
        side = round(self.ranks ** (1 / way.axes)) if way.axes else 1
        asked = Options(
            measure=False,
            optimizer="sgd",
            recompute="none",
            stages=1,
            micro_batches=1,
            mesh="x".join([str(side)] * max(1, way.axes)),
            force=way.pins(self.layers) if way.axes else None,
        )
        return request_of(asked, self.cluster)[0]

    def plan(self) -> Plan:
        target, request = self.target, self.request
        return autopar.plan(
            target.model,
            self.cluster,
            target.args,
            measure=False,
            optimizer="sgd",
            recompute="none",
            stages=1,
            micro_batches=1,
            mesh=request.mesh,
            force=request.pins,
        )


def measure(case: Case, plan: Plan) -> int:
    """Bytes of this rank's tensors at the peak of a step; on a worker."""
    job = ContestJob("", case.cluster, case.request, "sgd", None, None)
    contest = Contest(job, case.target)
    trainer = contest.trainer(Row(case.way, plan, None))
    trainer.step()

    def peak() -> int:
        alive = (each for each in trainer.tensors() if each.layout is torch.strided)
        return peak_bytes(trainer.step, alive, contest.device)

    return min(peak() for _ in range(TIMES))


def names(ranks: list[int]) -> Iterator[tuple[str, int]]:
    """One rank first, of both graphs; then squares in two dims, cubes in three."""
    yield from ((SERIAL, 1), (SERIAL_BAND, 1))
    for number in ranks:
        for name, way in WAYS.items():
            if way.axes and round(number ** (1 / way.axes)) ** way.axes == number:
                yield name, number


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks, each a process.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the net.")] = 8,
    ways: Annotated[list[str] | None, typer.Option("--way", help="Words of ways; all.")] = None,
) -> None:
    """Print peaks of the fullest rank."""
    heads = "predicted, MB", "measured, MB", "predicted / measured", "measured / formula"
    table = Table("split", "ranks", *heads, "P x", "P x, what is cut", box=None)
    alone: dict[str, tuple[int, int]] = {}
    for name, number in names(ranks or [4, 8, 9, 16, 27]):
        if number > 1 and ways and not any(word in name for word in ways):
            continue
        case = Case(name, number, layers)
        plan, pool = case.plan(), Pool(number)
        try:
            found = max(pool.run(measure, case, plan, timeout=TIMEOUT))
        finally:
            pool.close()
        cut = found - whole_bytes(case.entries)
        all_alone, cut_alone = alone.setdefault(WAYS[name].graph, (found, cut))
        row = (
            name,
            str(number),
            f"{plan.peak_bytes / 1e6:.3f}",
            f"{found / 1e6:.3f}",
            f"{plan.peak_bytes / found:.3f}",
            f"{found / case.formula:.3f}",
            f"{number * found / all_alone:.2f}",
            f"{number * cut / cut_alone:.2f}",
        )
        print("   ".join(row), flush=True)
        table.add_row(*row)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
