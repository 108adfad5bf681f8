"""Small graphs, and nets on them, with what graphs have: isolated vertices, self loops, edges that repeat."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.trace.target import Target

VERTICES, FEATURES, HIDDEN, CLASSES = 23, 6, 8, 4


def edges(count: int = 70, *, seed: int = 0) -> Tensor:
    """Directed edges between the first vertices but the last three, with self loops and twins."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, VERTICES - 3, (2, count), generator=generator)
    found[:, :3] = torch.arange(3)
    found[:, 3] = found[:, 4]
    return found


class SumOfNeighbours(nn.Module):
    """A layer by index_select and index_add; every step of it in one line."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        messages = self.linear(x)[source]
        return torch.zeros(len(x), messages.shape[1]).index_add(0, target, messages)


def adjacency(layout: str = "coo", *, seed: int = 0) -> Tensor:
    """The weighted matrix of these edges, from source to target: y = A x adds up what comes in."""
    source, target = edges(seed=seed)
    weights = torch.linspace(0.5, 1.5, len(source))
    made = torch.sparse_coo_tensor(torch.stack((target, source)), weights, (VERTICES, VERTICES)).coalesce()
    return made if layout == "coo" else made.to_sparse_csr()


class SparseLayer(nn.Module):
    """A layer by a product with a sparse matrix that is passed."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, out)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        return torch.addmm(self.linear.bias, matrix, x @ self.linear.weight.t())


class HeldLayer(nn.Module):
    """The matrix is a buffer, and is used as it is and transposed."""

    matrix: Tensor

    def __init__(self, features: int, out: int, layout: str = "csr") -> None:
        super().__init__()
        self.linear, self.back = nn.Linear(features, out), nn.Linear(features, out)
        self.register_buffer("matrix", adjacency(layout))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(self.matrix, self.linear(x)) + self.matrix.t() @ self.back(x)
        return out


class WeightedLayer(nn.Module):
    """Every edge has a weight that is learned."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, out)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 70))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        made = torch.sparse_coo_tensor(edge_index.flip(0), self.weight, (len(x), len(x)))
        out: Tensor = made @ self.linear(x)
        return out


class Net(nn.Module):
    """Two layers, a skip, batch norm and dropout."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = layer(FEATURES, HIDDEN), layer(HIDDEN, CLASSES)
        self.norm, self.skip = nn.BatchNorm1d(HIDDEN), nn.Linear(FEATURES, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.first(x, edge_index) + self.skip(x))
        x = F.dropout(F.relu(x), 0.3, self.training)
        out: Tensor = self.last(x, edge_index)
        return out


def target(
    layer: Callable[[int, int], nn.Module], name: str = "net", *, structure: Tensor | None = None
) -> Target:
    """A net of such layers, of whose vertices some are labelled."""
    torch.manual_seed(0)
    labelled = torch.rand(VERTICES) > 0.4
    graph = edges() if structure is None else structure
    inputs = (torch.randn(VERTICES, FEATURES), graph, torch.randint(0, CLASSES, (VERTICES,)))

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out[labelled], labels[labelled])

    return Target(Net(layer), inputs, {}, loss, name)
