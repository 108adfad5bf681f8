"""Batches of many small graphs, pooled by graph, are cut between graphs, and train as alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import verify
from autopar.cluster import ClusterSpec
from autopar.core.mesh import Mesh
from autopar.core.placement import Shard
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.export import trace
from autopar.trace.rewrites.edge_operators import PICK, PLACE
from autopar.trace.target import Target

SIZES = (5, 7, 4, 9, 6, 8)  # vertices of each graph
FEATURES, WIDTH, CLASSES = 6, 8, 4


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, edges within each graph, the graph of each vertex, and a label of each graph."""
    generator = torch.Generator().manual_seed(0)
    start, edges = 0, []
    for size in SIZES:
        edges.append(start + torch.randint(0, size, (2, 3 * size), generator=generator))
        start += size
    graph = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    labels = torch.randint(0, CLASSES, (len(SIZES),), generator=generator)
    return torch.randn(start, FEATURES, generator=generator), torch.cat(edges, 1), graph, labels


class Net(nn.Module):
    """Messages along edges, and the mean of each graph."""

    def __init__(self, count: int | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.count = count

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        source, target = edge_index
        x = self.first(x)
        x = torch.zeros_like(x).index_add(0, target, torch.tanh(x[source] - x[target]))
        count = int(graph.max()) + 1 if self.count is None else self.count
        index = graph.view(-1, 1).expand_as(x)
        means = x.new_zeros(count, WIDTH).scatter_reduce(0, index, x, "mean", include_self=False)
        out: Tensor = self.last(means)
        return out


def target(count: int | None = None) -> Target:
    torch.manual_seed(0)
    return Target(Net(count), batch(), {}, F.cross_entropy, "net")


def test_vertices_and_edges_are_cut_between_graphs() -> None:
    inputs = batch()[:3]
    graph = trace(Net(), inputs, static=("graph",)).graph
    dims = Dims(graph, find_atoms(graph), Mesh((3,)))
    sums, means = (item for item in graph.operators if item.target is PLACE)
    bounds = [0, *torch.tensor(SIZES).cumsum(0)[1::2].tolist()]
    for rank in range(3):
        span = (bounds[rank], bounds[rank + 1])
        assert dims.rows(means.operands[0], Shard(0), (Shard(0),), (rank,)) == span
        assert dims.rows(sums.operands[0], Shard(0), (Shard(0),), (rank,)) == (3 * span[0], 3 * span[1])


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("count", "static"), [(None, ("graph",)), (6, ("graph",)), (6, ()), (None, ())])
def test_they_train_as_alone(count: int | None, static: tuple[str, ...], devices: int) -> None:
    """Also where which vertex is of which graph is no structure: sums of graphs are gathered then."""
    forces: list[object] = [None, "batch"]
    if static:
        graph = trace(Net(count), batch()[:3], static=static).graph
        forces.append({item.name: ("r",) for item in graph.operators if item.target in (PICK, PLACE)})
    for force in forces:
        cluster = ClusterSpec.local(devices)
        if force is not None and count is None and not static:
            continue
        report = verify(
            target(count),
            cluster,
            steps=2,
            changes=0,
            stages=1,
            micro_batches=1,
            static=static,
            force=force,  # type: ignore[arg-type]
        )
        assert report.verdict.passed, report.verdict
