"""What pages take for granted of a reader's own project."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass
class Output:
    """What the model returns."""

    scores: Tensor
    loss: Tensor


torch.export.register_dataclass(Output)


class Model(nn.Module):
    """Scores, and the loss beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        scores = self.layers(x)
        return Output(scores, F.cross_entropy(scores, y))


def build_model() -> Model:
    """A freshly initialised model."""
    return Model()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Three batches of 16."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        yield torch.randn(16, 16, generator=generator), torch.randint(4, (16,), generator=generator)


dataset = TensorDataset(
    torch.randn(192, 16, generator=torch.Generator().manual_seed(0)),
    torch.randint(4, (192,), generator=torch.Generator().manual_seed(1)),
)
