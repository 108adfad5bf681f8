"""What runs on each rank where nets on big graphs are timed: every contender's losses, then steps in turn.

plan     the plan that autopar chooses
gather   all vertices' features gathered for each product (1D)
needed   only the rows that a rank reads are exchanged
half     half the vertices and edges on each rank, by the same kernel, and no word to the other
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.errors import CheckError
from autopar.results.plan.plan import Plan
from autopar.runtime.launch import worker
from autopar.runtime.sparse_kernel import SPMM
from autopar.sharding.sparse_blocks import block_of
from tests.benchmarks.contest import Contestant, Timed, compete
from tests.benchmarks.host_contest import say, trained

PLAN, GATHER, NEEDED, HALF = "plan", "gather", "needed", "half"
FORCED = {GATHER: "i", NEEDED: "r"}
CLASSES, LAYERS, STEPS, RATE = 16, 2, 3, 0.1
TOLERANCE = 1e-3  # relative, of a loss in float32
CLUSTER, INSIDE = 256, 0.95  # vertices of a cluster, and the share of edges that stay in it
ODDS = (0.57, 0.19, 0.19, 0.05)  # of R-MAT, as Graph500 has them
SENT = Path("/sys/class/net/net0/statistics/tx_bytes")  # of a host's only link


@dataclass(frozen=True, slots=True)
class Shape:
    """A graph of 2^`scale` vertices and 2^`edges` edges, and the width of its features."""

    graph: str
    scale: int
    edges: int
    width: int

    @property
    def vertices(self) -> int:
        return 1 << self.scale

    def half(self) -> Shape:
        return Shape(self.graph, self.scale - 1, self.edges - 1, self.width)

    def adjacency(self) -> Tensor:
        """The mean over incoming edges, in CSR form."""
        source, target = GRAPHS[self.graph](self.scale, 1 << self.edges)
        count, n = source.numel(), self.vertices
        shares = 1 / torch.bincount(target, minlength=n).clamp(min=1)
        order = torch.argsort(target * n + source)
        crow = torch.zeros(n + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(target, minlength=n), 0, out=crow[1:])
        source, target = source[order], target[order]
        assert len(source) == count
        return torch.sparse_csr_tensor(crow, source, shares[target], (n, n), check_invariants=False)

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.vertices, self.width, generator=generator)
        return x, torch.randint(0, CLASSES, (self.vertices,), generator=generator)


def rmat(scale: int, count: int) -> tuple[Tensor, Tensor]:
    """Sources and targets of R-MAT's edges, whose vertices are numbered anew by a random permutation.

    Source: Chakrabarti, Zhan and Faloutsos, 2004.
    """
    generator = torch.Generator().manual_seed(0)
    source, target = torch.zeros(2, count, dtype=torch.int64)
    for _ in range(scale):
        drawn = torch.rand(count, generator=generator)
        quarter = torch.bucketize(drawn, torch.tensor(ODDS).cumsum(0)[:3])
        source, target = 2 * source + quarter // 2, 2 * target + quarter % 2
    numbers = torch.randperm(1 << scale, generator=generator)
    return numbers[source], numbers[target]


def clustered(scale: int, count: int) -> tuple[Tensor, Tensor]:
    """Edges that mostly stay among `CLUSTER` vertices that are numbered one after another."""
    generator = torch.Generator().manual_seed(0)
    n = 1 << scale
    source = torch.randint(0, n, (count,), generator=generator)
    near = source // CLUSTER * CLUSTER + torch.randint(0, CLUSTER, (count,), generator=generator)
    far = (near + torch.randint(1, 5, (count,), generator=generator) * CLUSTER) % n  # to the next clusters
    return source, torch.where(torch.rand(count, generator=generator) < INSIDE, near % n, far)


GRAPHS: dict[str, Callable[[int, int], tuple[Tensor, Tensor]]] = {"rmat": rmat, "clustered": clustered}


class Net(nn.Module):
    """Layers of a graph that the model holds."""

    adjacency: Tensor

    def __init__(self, adjacency: Tensor, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [width] * LAYERS + [CLASSES]
        self.layers = nn.ModuleList(
            nn.Linear(one, other) for one, other in zip(widths, widths[1:], strict=False)
        )
        self.register_buffer("adjacency", adjacency)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(self.adjacency, x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(self.mix(layer(x)))
        return self.mix(self.layers[-1](x))


class Multiplied(Net):
    """The same, by the kernel and from the forms that a rank of a program has."""

    def __init__(self, adjacency: Tensor, width: int) -> None:
        super().__init__(adjacency, width)
        n, crow = adjacency.shape[0], adjacency.crow_indices()
        rows = torch.arange(n).repeat_interleave(crow.diff())
        block = block_of(rows, adjacency.col_indices(), (n, n))
        crow, column, *transposed, order = block.forms
        values = adjacency.values()
        self.forms = crow, column, values, (*transposed, None, values[order])

    def mix(self, x: Tensor) -> Tensor:
        crow, column, values, transposed = self.forms
        out: Tensor = SPMM(crow, column, values, x, *transposed)
        return out


@dataclass(frozen=True, slots=True)
class Found:
    """Times; predicted bytes and processor seconds of planning; bytes that this rank sent in a step, where
    it has a link of its own; the largest resident set in bytes; how products are split."""

    timed: Timed
    planning: dict[str, float]
    sent: dict[str, int]
    resident: int
    splits: dict[str, str]


def contest(
    shape: Shape, names: tuple[str, ...], rounds: int, cluster: ClusterSpec, costdb: str | None
) -> Found:
    """The contenders called so on this rank; the same on every rank, but for what it sent.

    Plans rest on what is measured here, and put into `costdb`; without one, on estimates.
    """
    torch.set_num_threads(1)
    worker.init()
    contestants: dict[str, Contestant] = {}
    planning, sent, splits = dict[str, float](), dict[str, int](), dict[str, str]()
    reference: list[float] = []
    for name in names:
        say(f"{shape.graph}, width {shape.width}: {name}")
        began = time.process_time()
        step, plan = _half(shape) if name == HALF else _planned(shape, name, cluster, costdb)
        planning[name] = time.process_time() - began
        losses = [float(step()) for _ in range(STEPS)]
        if plan is not None:
            reference = reference or losses
            _check(name, losses, reference)
            splits[name] = _split(plan)
        if SENT.exists():
            sent[name] = _sent(step)
        contestants[name] = Contestant(
            step,
            predicted=plan.step_seconds if plan else None,
            program=str(plan.program) if plan else None,
        )
    say(f"{shape.graph}, width {shape.width}: {rounds} rounds")
    timed = compete(contestants, rounds=rounds, keep=tuple(contestants))
    return Found(timed, planning, sent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, splits)


def _planned(
    shape: Shape, name: str, cluster: ClusterSpec, costdb: str | None
) -> tuple[Callable[[], Tensor], Plan]:
    products = ["product", *(f"product_{number}" for number in range(1, LAYERS))]
    asked: dict[str, Any] = {}
    if name in FORCED:
        asked = {"force": dict.fromkeys(products, [FORCED[name]]), "mesh": str(cluster.num_devices)}
    batch = shape.batch()
    parallel = autopar.parallelize(
        Net(shape.adjacency(), shape.width),
        cluster,
        batch,
        loss_fn=F.cross_entropy,
        optimizer="sgd",
        stages=1,
        micro_batches=1,
        measure=costdb is not None,
        costdb=costdb,
        **asked,
    )

    def learn() -> Tensor:
        loss: Tensor = parallel(*batch)
        loss.backward()
        return loss.detach()

    return trained(parallel, learn, rate=RATE, momentum=0.0), parallel.plan


def _half(shape: Shape) -> tuple[Callable[[], Tensor], None]:
    mine = shape.half()
    net, (x, labels) = Multiplied(mine.adjacency(), mine.width), mine.batch()

    def learn() -> Tensor:
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        return loss.detach()

    return trained(net, learn, rate=RATE, momentum=0.0), None


def _check(name: str, losses: list[float], wanted: list[float]) -> None:
    """Plans of one net train alike; the losses move by more than they may differ."""
    far = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, wanted, strict=True))
    if far > TOLERANCE:
        raise CheckError(
            where=f"losses of {name}",
            found=", ".join(f"{loss:.6f}" for loss in losses),
            wanted=", ".join(f"{loss:.6f}" for loss in wanted),
            remedy="run `autopar verify` on this model and plan",
        )


def _sent(step: Callable[[], object]) -> int:
    dist.barrier()
    before = int(SENT.read_text())
    step()
    dist.barrier()
    return int(SENT.read_text()) - before


def _split(plan: Plan) -> str:
    """The mesh, and the factor of each product on each axis."""
    found = (
        "x".join(each.factor if each.shards else "-" for each in strategy)
        for name, strategy in plan.program.strategies.items()
        if name.startswith("product")
    )
    return f"{plan.mesh}: {', '.join(found)}"
