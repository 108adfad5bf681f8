"""What `tests.benchmarks.memory` trains: the examples, as they are and larger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples import characters, photographs


def gpt() -> Any:
    return characters.characters()


def gpt_wide() -> Any:
    """Four times the width: weights weigh as much as activations."""
    model = characters.gpt(4, 512, 8, vocabulary=len(set(characters.text())), sequence=128)
    return model, next(characters.batches(8))


def unet() -> Any:
    return photographs.unet_crops()


def unet_full() -> Any:
    return photographs.unet_full()


def tiny() -> Any:
    """Two blocks of width 64 on random tokens: small enough for the tests."""
    tokens = torch.randint(40, (8, 65))
    inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return characters.gpt(2, 64, 4, vocabulary=40, sequence=64), inputs


def small_unet() -> Any:
    """Two levels of width 8 on four crops of 32 x 32."""
    return photographs.unet(8, 2), photographs.noisy(photographs.crops(32, 32)[:4])


def heavy() -> Any:
    """Few samples and many weights, none of them large: sums of gradients need more than activations."""
    layers = [module for _ in range(12) for module in (nn.Linear(256, 256, bias=False), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(16, 256), torch.randn(16, 256)), F.mse_loss


class SumOfNeighbours(nn.Module):
    """A linear layer on vertices, and the sums of what comes along edges."""

    def __init__(self, width: int, bend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.bend = nn.Linear(width, width), bend

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index
        messages = self.linear(x)
        return torch.zeros_like(messages).index_add(0, target, self.bend(messages[source]))


def graph_net(bend: Callable[[torch.Tensor], torch.Tensor] = lambda messages: messages) -> Any:
    """Many edges between few vertices of few features: the list of edges weighs as much as all else."""
    edges = torch.randint(500, (2, 20_000))
    return SumOfNeighbours(4, bend), (torch.randn(500, 4), edges, torch.randn(500, 4)), F.mse_loss


def bent_messages() -> Any:
    """The same with something made of each message, so that edges are gone along one by one."""
    return graph_net(torch.relu)
