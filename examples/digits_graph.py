"""Handwritten digits classified by their neighbours: one graph, 5 % of whose vertices are labelled.

Each digit is a vertex, joined to the eight digits that look most like it. A net of two layers is trained on
all of them at once; what is split over processes are vertices and features. Beside it stands the classical
answer, labels that spread along the edges until they settle.

    python examples/digits_graph.py
    autopar plan examples/digits_graph.py:sparse --cluster local:4
    autopar verify examples/digits_graph.py:geometric --cluster local:2
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

NUM_CLASSES = 10
NEIGHBOURS = 8
LABELLED = 0.05
HIDDEN = 64
SEED = 0
UNLABELLED = -100  # what cross entropy leaves out

Loss = Callable[[Tensor, Tensor], Tensor]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Pixels [n, 64] from 0 to 1, and classes [n]."""
    data = load_digits()
    return torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)


@cache
def edges() -> Tensor:
    """Both directions of each edge between a digit and one of its nearest, each once: [2, edges]."""
    pixels, _ = digits()
    nearest = torch.cdist(pixels, pixels).topk(NEIGHBOURS + 1, largest=False).indices[:, 1:]
    here = torch.arange(len(pixels)).repeat_interleave(NEIGHBOURS)
    there = nearest.reshape(-1)
    both = torch.stack((torch.cat((here, there)), torch.cat((there, here))))
    return both.unique(dim=1)  # type: ignore[no-any-return]


def normalised() -> Tensor:
    """D^-1/2 (A + 1) D^-1/2 as a sparse matrix, D the degrees with the vertex itself."""
    count = len(digits()[0])
    own = torch.arange(count)
    source, target = torch.cat((edges(), torch.stack((own, own))), 1)
    scale = torch.bincount(target, minlength=count).float().rsqrt()
    values = scale[source] * scale[target]
    return torch.sparse_coo_tensor(torch.stack((target, source)), values, (count, count)).coalesce()


def known_labels() -> Tensor:
    """The classes of 5 % of the digits, UNLABELLED for the others."""
    _, classes = digits()
    chosen = torch.rand(len(classes), generator=torch.Generator().manual_seed(SEED)) < LABELLED
    return torch.where(chosen, classes, UNLABELLED)


class GraphNet(nn.Module):
    """Two layers A relu(A x W + b) W' + b', A a sparse matrix that the model holds."""

    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, NUM_CLASSES)
        self.register_buffer("adjacency", normalised())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(torch.sparse.mm(self.adjacency, self.first(x)))
        return torch.sparse.mm(self.adjacency, self.last(x))  # type: ignore[no-any-return]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The whole graph at every step: pixels, and the labels that are known."""
    while True:
        yield digits()[0], known_labels()


def sparse() -> tuple[nn.Module, tuple[Tensor, Tensor], Loss]:
    """TARGET: the net in torch.sparse."""
    return GraphNet(), next(batches()), F.cross_entropy


def geometric() -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor], Loss]:
    """TARGET: the same by unedited layers of PyTorch Geometric, which has to be installed."""
    from torch_geometric.nn import GCNConv

    class Geometric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = GCNConv(64, HIDDEN), GCNConv(HIDDEN, NUM_CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.last(F.relu(self.first(x, edge_index)), edge_index)
            return out

    return Geometric(), (digits()[0], edges(), known_labels()), F.cross_entropy


def spread_labels(rounds: int = 50, share: float = 0.9) -> Tensor:
    """Label propagation (Zhou et al., 2003): each digit takes `share` of its class from its neighbours."""
    labels = known_labels()
    known = F.one_hot(labels.clamp(min=0), NUM_CLASSES).float() * (labels != UNLABELLED)[:, None]
    matrix, scores = normalised(), known
    for _ in range(rounds):
        scores = share * torch.sparse.mm(matrix, scores) + (1 - share) * known
    return scores.argmax(1)


def accuracy(predicted: Tensor) -> float:
    """The share of the digits without a label that are told rightly."""
    hidden = known_labels() == UNLABELLED
    return float((predicted == digits()[1])[hidden].float().mean())


def report() -> None:
    """Print how well the net, trained serially, and spread labels tell the digits without a label."""
    torch.manual_seed(SEED)
    model, (pixels, labels), loss_fn = sparse()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(100):
        optimizer.zero_grad()
        loss_fn(model(pixels), labels).backward()
        optimizer.step()
    net, spread = accuracy(model(pixels).argmax(1)), accuracy(spread_labels())
    print(f"\ngraph net {net:.1%}, label propagation {spread:.1%} of the digits without a label")


if __name__ == "__main__":
    from train import Task, main

    task = Task(GraphNet, batches, num_steps=10, rate=0.5, tolerance=1e-4, loss_fn=F.cross_entropy)
    code = main(__file__, task)
    if os.environ.get("RANK") == "0":
        report()
    sys.exit(code)
