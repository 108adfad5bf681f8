"""An OPT as Megatron-DeepSpeed runs it: attention in plain products, a ReLU, float32, no dropout."""

from __future__ import annotations

import math
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.force import Pins
from autopar.core.graph import Graph
from tests.benchmarks.published.llama import BLOCK
from tests.benchmarks.published.pieces import traced_model

HIDDEN, BLOCKS, HEADS, VOCABULARY, SEQUENCE = 1024, 24, 16, 50272, 2048  # of OPT-350


class OptAttention(nn.Module):
    """Masked attention in plain products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, HIDDEN // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-2, -1) / math.sqrt(HIDDEN // HEADS)).masked_fill(mask, -1e4)
        return cast(Tensor, self.o((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)))


class OptBlock(nn.Module):
    """Attention and MLP, each after a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = OptAttention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), mask)
        return cast(Tensor, x + self.down(F.relu(self.up(self.before_mlp(x)))))


class Opt(nn.Module):
    """Tables of tokens and places, one block, and a head of its own; gives the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Parameter(torch.zeros(SEQUENCE, HIDDEN))
        self.blocks = nn.ModuleList([OptBlock()])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.register_buffer("mask", torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens) + self.places, self.mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@cache
def traced_opt(samples: int) -> Graph:
    """The graph of one micro-batch."""
    with torch.device("meta"):
        tokens = torch.zeros(samples, SEQUENCE, dtype=torch.long)
        return traced_model(Opt(), (tokens, tokens))


def opt_pins() -> Pins:
    """Megatron's tensor parallelism: columns, rows, a vocabulary in parts, norms on every device."""
    found = {f"{BLOCK}.{name}": ("o",) for name in ("attention.q", "attention.k", "attention.v", "up")}
    found |= {f"{BLOCK}.{name}": ("i",) for name in ("attention.o", "down")}
    norms = dict.fromkeys((f"{BLOCK}.before_attention", f"{BLOCK}.before_mlp"), (None,))
    return {**found, **norms, "embed": ("v",), "head": ("o",), "cross_entropy_loss": ("c",)}
