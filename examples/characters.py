"""A character language model: a small GPT on the English of Python's own reference manual.

python examples/characters.py
autopar plan examples/characters.py:characters --cluster local:4
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS, HIDDEN, HEADS = 4, 128, 4
SEQUENCE = 128
BATCH = 16
SEED = 0


class Attention(nn.Module):
    """Causal self-attention; query, key and value are one fused projection."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a GELU MLP, each after a layer norm and around a residual."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm_mlp = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_mlp(x)))
        return out


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that shares the token embedding's weight."""

    def __init__(
        self, *, blocks: int, hidden: int, heads: int, vocabulary: int, sequence: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(sequence, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(hidden, heads, dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for weight in (self.token.weight, self.position.weight):
            nn.init.normal_(weight, std=0.02)  # as GPT-2: logits start near zero
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [n, s, vocabulary] for tokens [n, s]; with `targets` [n, s] their mean cross-entropy."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(blocks: int, hidden: int, heads: int, vocabulary: int, sequence: int, *, dropout: float = 0.1) -> GPT:
    """A freshly initialised GPT, on torch's current default device (which may be meta)."""
    return GPT(
        blocks=blocks, hidden=hidden, heads=heads, vocabulary=vocabulary, sequence=sequence, dropout=dropout
    )


def text() -> str:
    """About 465,000 characters."""
    return "\n".join(topics.values())


def encode(characters: str) -> Tensor:
    """The place of each character in the sorted alphabet of the text."""
    place = {character: number for number, character in enumerate(sorted(set(characters)))}
    return torch.tensor([place[character] for character in characters])


def batches(size: int = BATCH, sequence: int = SEQUENCE) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the tokens that follow them, both [size, sequence], always the same, without end."""
    codes = encode(text())
    generator = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(len(codes) - sequence, (size, 1), generator=generator)
        window = codes[starts + torch.arange(sequence + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def model() -> GPT:
    """The model that the example trains."""
    return gpt(BLOCKS, HIDDEN, HEADS, vocabulary=len(set(text())), sequence=SEQUENCE)


def characters() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """TARGET: 16 pieces of 128 characters."""
    return model(), next(batches())


if __name__ == "__main__":
    from train import Task, main

    # Shards of a dropped-out tensor draw their own masks, so the losses agree as two seeds would.
    sys.exit(main(__file__, Task(model, batches, num_steps=30, rate=0.05, tolerance=0.1)))
