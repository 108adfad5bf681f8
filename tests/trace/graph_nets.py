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


def target(layer: Callable[[int, int], nn.Module], name: str = "net") -> Target:
    """A net of such layers, of whose vertices some are labelled."""
    torch.manual_seed(0)
    labelled = torch.rand(VERTICES) > 0.4
    inputs = (torch.randn(VERTICES, FEATURES), edges(), torch.randint(0, CLASSES, (VERTICES,)))

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out[labelled], labels[labelled])

    return Target(Net(layer), inputs, {}, loss, name)
