"""Random graphs and layers on them, and random programs of these, proved against the serial graph."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.trace.export import trace
from tests.proof.models import Model, serial

MESHES = [Mesh(shape) for shape in ((2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2))]
Mix = Callable[["Layer", Tensor, Tensor], Tensor]
FEATURES = 3


class Layer(nn.Module):
    """Mixes features of vertices along edges, of which each has a weight that learns."""

    def __init__(self, mix: Mix, count: int) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, count))
        self.mix = mix

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        mixed: Tensor = self.out(torch.tanh(self.mix(self, self.linear(x), edge_index)))
        return x + mixed


def placed(rows: Tensor, index: Tensor, length: int, reduce: str = "sum") -> Tensor:
    """Rows reduced where they are placed."""
    index = index.view(-1, 1).expand_as(rows)
    if reduce == "sum":
        return rows.new_zeros(length, rows.shape[1]).scatter_add(0, index, rows)
    return rows.new_zeros(length, rows.shape[1]).scatter_reduce(0, index, rows, reduce, include_self=False)


def summed(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    source, target = edge_index
    return torch.zeros_like(x).index_add(0, target, x[source] * net.weight[:, None])


def multiplied(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    made: Tensor = torch.sparse_coo_tensor(edge_index.flip(0), net.weight, (len(x), len(x))) @ x
    return made


def largest(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    source, target = edge_index
    return placed(torch.tanh(x[source] - x[target]), target, len(x), "amax")


def averaged(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    source, target = edge_index
    messages = torch.tanh(x[source] + net.weight[:, None])
    return placed(messages, target, len(x), "mean") - torch.zeros_like(x).index_add(0, source, messages)


def attended(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    source, target = edge_index
    score = F.leaky_relu((x[source] * x[target]).sum(1, keepdim=True))
    share = torch.exp(score - placed(score.detach(), target, len(x), "amax")[target])
    share = share / torch.zeros(len(x), 1).index_add(0, target, share)[target]
    return torch.zeros_like(x).index_add(0, target, share * x[source])


def dropped(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    source, target = edge_index
    messages = F.dropout(torch.tanh(x[source]), 0.3, net.training) * net.weight.view(-1, 1)
    return torch.zeros_like(x).index_add(0, target, messages)


def normalised(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    """By what all edges have together, of which a rank may have none."""
    source, target = edge_index
    messages = F.batch_norm(torch.tanh(x[source] - 2 * x[target]), None, None, training=True)
    messages = torch.softmax(messages, 0) + messages - messages.amax(0) - messages.var(0, unbiased=False)
    means = placed(messages * net.weight[:, None], target, len(x), "mean")
    out: Tensor = means + messages.mean() * messages.norm()
    return out


def clustered(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    """What is placed is placed again, in clusters that are in no order, and comes back from there."""
    source, target = edge_index
    clusters = (torch.arange(len(x)) * 5 + 3) % 4
    sums = torch.tanh(placed(torch.tanh(x[source] - x[target]), target, len(x)))
    means: Tensor = placed(sums, clusters, 4, "mean")[clusters]
    return means


def copied(net: Layer, x: Tensor, edge_index: Tensor) -> Tensor:
    """Rows of some vertices are written over, and sums are added to what is there."""
    source, target = edge_index
    reached = torch.arange(len(x))[1::2]
    out = x.index_copy(0, reached, torch.tanh(x[reached]) * 2)
    return out.index_add(0, target, torch.tanh(x[source]) * net.weight[:, None])


MIXES = (
    summed,
    multiplied,
    largest,
    averaged,
    attended,
    dropped,
    normalised,
    clustered,
    copied,
)


def draw_edges(random: Random) -> tuple[int, Tensor]:
    """The number of vertices and edges: loops, twins, isolated vertices, hubs, in order or not."""
    count = random.choice((6, 7, 11))
    last = random.choice((count - 1, count - 1, count // 2))  # the vertices after it may be isolated
    first = random.choice((0, 0, last // 2))  # edges lead to none before it
    pairs = [
        (random.randint(0, last), random.choice((random.randint(first, last), first)))
        for _ in range(random.randint(6, 24))
    ]
    if random.random() < 0.3:
        pairs.sort(key=lambda pair: pair[1])
    return count, torch.tensor(pairs).t().contiguous()


def draw_model(random: Random, mix: Mix) -> Model:
    """A net of one or two layers on such a graph, with values."""
    count, edge_index = draw_edges(random)
    torch.manual_seed(seed := random.randint(0, 2**30))
    layers = [Layer(mix, edge_index.shape[1]) for _ in range(random.choice((1, 2)))]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edge_index)
            return x

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        net, x = Net().double(), torch.randn(count, FEATURES).requires_grad_()
        graph = trace(net, (x, edge_index)).graph
        alone = net(x, edge_index) if mix is not dropped else None
    finally:
        torch.set_default_dtype(before)
    given = {**dict(net.named_parameters()), "input_0": x}
    tensors = {
        item.name: item.value if item.value is not None else given[item.target] for item in graph.inputs
    }
    model = Model(graph, {name: value.detach().clone() for name, value in tensors.items()}, seed)
    if alone is not None:
        torch.testing.assert_close(serial(model)[graph.outputs[0]], alone)
    return model
