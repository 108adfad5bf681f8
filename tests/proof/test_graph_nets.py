"""Nets on graphs train as the serial model does, however their vertices, edges and features are split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import verify
from autopar.cluster import ClusterSpec
from autopar.trace.export import trace
from autopar.trace.rewrites.edge_operators import PICK, PLACE
from tests.trace.graph_nets import (
    HIDDEN,
    VERTICES,
    HeldLayer,
    SparseLayer,
    SumOfNeighbours,
    WeightedLayer,
    adjacency,
    edges,
    target,
)

Layer = Callable[[int, int], nn.Module]


def layers() -> dict[str, Layer]:
    """Unedited layers of PyTorch Geometric."""
    nets = pytest.importorskip("torch_geometric.nn")

    def gin(features: int, out: int) -> nn.Module:
        inner = nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out))
        made: nn.Module = nets.GINConv(inner, train_eps=True)
        return made

    return {
        "gcn": nets.GCNConv,
        "sage": nets.SAGEConv,
        "sage_max": lambda features, out: nets.SAGEConv(features, out, aggr="max"),
        "gat": lambda features, out: nets.GATConv(features, out, heads=2, concat=False, dropout=0.2),
        "gin": gin,
        "gatv2": lambda features, out: nets.GATv2Conv(features, out, heads=2, concat=False),
        "transformer": lambda features, out: nets.TransformerConv(features, out, heads=2, concat=False),
    }


def prove(
    layer: Layer,
    devices: int,
    force: str | Mapping[str, Sequence[str]] | None,
    *,
    structure: Tensor | None = None,
    mesh: str | None = None,
) -> None:
    report = verify(
        target(layer, structure=structure),
        ClusterSpec.local(devices),
        steps=2,
        changes=0,
        stages=1,
        micro_batches=1,
        force=force,
        mesh=mesh,
    )
    assert report.verdict.passed, report.verdict


@pytest.mark.parametrize("force", ["batch", "filter"])
def test_sums_over_edges_are_those_of_the_serial_model(force: str) -> None:
    prove(SumOfNeighbours, 2, force)


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_unedited_layers_train_as_alone(name: str) -> None:
    prove(layers()[name], 2, "batch")


VARIANTS = [
    *(("2", (factor,)) for factor in "ijfr"),
    *(("2x2", factors) for factors in (("i", "j"), ("j", "i"), ("i", "f"), ("i", "i"), ("r", "f"))),
    *(("2x3", factors) for factors in (("j", "f"), ("f", "i"), ("r", "j"), ("i", "r"), ("r", "r"))),
]
QUICK = [("2x2", ("i", "j")), ("2", ("j",)), ("2", ("r",))]
SPARSE: dict[str, tuple[Layer, Tensor | None]] = {
    "coo": (SparseLayer, adjacency("coo")),
    "csr": (SparseLayer, adjacency("csr")),
    "held": (HeldLayer, None),
    "weighted": (WeightedLayer, None),
}


def prove_variant(name: str, mesh: str, factors: Sequence[str]) -> None:
    """Every product of the net is split by these factors, one for each axis."""
    layer, structure = SPARSE[name]
    names = ["product", "product_1"] if name != "held" else [f"product_{n}" for n in range(1, 4)]
    devices = math.prod(map(int, mesh.split("x")))
    prove(layer, devices, dict.fromkeys(names, factors), structure=structure, mesh=mesh)


@pytest.mark.parametrize(("name", "variant"), [*zip(("csr", "weighted", "held"), QUICK, strict=True)])
def test_sparse_products_stay_where_they_are_in_blocks(name: str, variant: tuple[str, Sequence[str]]) -> None:
    prove_variant(name, *variant)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SPARSE)
def test_every_variant_of_sparse_products_is_right(name: str, variant: tuple[str, Sequence[str]]) -> None:
    prove_variant(name, *variant)


class TwoSteps(SparseLayer):
    """By a matrix that is computed of the one that is passed."""

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        twice = matrix @ matrix
        return (twice * 0.3) @ self.linear(x) + twice.to_dense().t() @ self.linear(x)


class MeanWithItself(SumOfNeighbours):
    """Means of what comes in and of what is there."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, (source, target) = self.linear(x), edge_index
        index = target.view(-1, 1).expand(-1, x.shape[1])
        return x.scatter_reduce(0, index, x[source], "mean", include_self=True)


def weighed(reduce: Callable[[Tensor], Tensor]) -> type[SumOfNeighbours]:
    """A net whose messages depend on all of them."""

    class Weighed(SumOfNeighbours):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x, (source, target) = self.linear(x), edge_index
            messages = x[source].tanh()
            return torch.zeros_like(x).index_add(0, target, messages * reduce(messages))

    return Weighed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        ("mean", lambda messages: messages.mean(0)),
        ("mean", lambda messages: messages.mean(0, keepdim=True)),
        ("mean", lambda messages: messages.mean()),
        ("softmax", lambda messages: messages.softmax(0)),
        ("log_softmax", lambda messages: messages.log_softmax(0)),
        ("logsumexp", lambda messages: messages.logsumexp(0)),
    ],
    ids=["mean", "mean kept", "mean of all", "softmax", "log_softmax", "logsumexp"],
)
def test_a_rank_without_edges_has_no_share_in_what_is_taken_of_all(
    name: str, reduce: Callable[[Tensor], Tensor]
) -> None:
    """No edge leads to the last third of the vertices."""
    source, destination = torch.arange(12) % VERTICES, torch.arange(12) % (2 * VERTICES // 3)
    pins = {each: ["d0"] for each in (name, f"{name}_1")}
    prove(weighed(reduce), 3, pins, structure=torch.stack([source, destination]))


class LargestOfSegments(SumOfNeighbours):
    """Of messages many of which are zero, so that several are the largest."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        order = torch.argsort(edge_index[1], stable=True)
        lengths = torch.bincount(edge_index[1], minlength=len(x))
        messages = F.relu(self.linear(x))[edge_index[0][order]]
        return torch.segment_reduce(messages, "max", lengths=lengths, axis=0, initial=0.0)


@pytest.mark.parametrize("force", ["batch", pytest.param("filter", marks=pytest.mark.long)])
@pytest.mark.parametrize("layer", [TwoSteps, MeanWithItself, LargestOfSegments])
def test_what_rounding_and_ties_decide_is_that_of_the_serial_model(layer: Layer, force: str) -> None:
    prove(layer, 2, force, structure=adjacency("coo") if layer is TwoSteps else None)


class Attention(nn.Module):
    """Messages weighed by a softmax over each vertex's edges, as GATConv's, with dropout of weights."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(features, out), nn.Linear(2 * out, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, (source, target) = self.linear(x), edge_index
        score = F.leaky_relu(self.weight(torch.cat((x[source], x[target]), 1)))[:, 0]
        none = score.new_zeros(len(x))
        most = none.scatter_reduce(0, target, score.detach(), "amax", include_self=False)
        share = torch.exp(score - most[target])
        share = F.dropout(share / none.index_add(0, target, share)[target], 0.2, self.training)
        return torch.zeros_like(x).index_add(0, target, share[:, None] * x[source])


def pinned(layer: Layer, factor: str, structure: Tensor | None = None) -> dict[str, list[str]]:
    """All operators of the net that pick or place rows, pinned to a factor."""
    net = target(layer, structure=structure)
    graph = trace(net.model, net.args, loss_fn=net.loss_fn).graph
    return {item.name: [factor] for item in graph.operators if item.target in (PICK, PLACE)}


@pytest.mark.parametrize("devices", [2, pytest.param(5, marks=pytest.mark.long)])
def test_attention_trains_as_alone_with_its_vertices_and_edges_split(devices: int) -> None:
    prove(Attention, devices, pinned(Attention, "r"))


class Normalised(nn.Module):
    """Messages that all edges normalise together: by batch norm, a softmax, the largest and the length."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(features, out), nn.BatchNorm1d(out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, (source, target) = self.linear(x), edge_index
        messages = self.norm(torch.tanh(x[source] - 2 * x[target]))
        messages = torch.softmax(messages, 0) + messages - messages.amax(0) - messages.var(0)
        return torch.zeros_like(x).index_add(0, target, messages) + messages.mean() * messages.norm()


def halved() -> Tensor:
    """Edges that lead to vertices of the second half alone."""
    source, target = edges()
    return torch.stack((source, VERTICES // 2 + 1 + target % (VERTICES // 2)))


@pytest.mark.long
@pytest.mark.parametrize("layer", [Normalised, Attention])
def test_a_rank_may_have_no_edges(layer: Layer) -> None:
    prove(layer, 2, pinned(layer, "r", halved()), structure=halved())


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer", "sage_max"])
def test_every_layer_may_exchange_the_rows_that_it_needs(name: str, devices: int) -> None:
    prove(layers()[name], devices, pinned(layers()[name], "r"))


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 3, 4, 6])
@pytest.mark.parametrize("force", [None, "batch", "filter", "channel"])
@pytest.mark.parametrize("name", ["gcn", "sage", "sage_max", "gat", "gin", "gatv2", "transformer"])
def test_every_layer_trains_as_alone_however_it_is_split(name: str, force: str | None, devices: int) -> None:
    prove(layers()[name], devices, force)
