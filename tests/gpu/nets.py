"""Small nets with every kind of kernel: convolutions, norms, masks, attention, tables, recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Tensor, Tensor]]


def images(dtype: torch.dtype = torch.float32) -> Case:
    """Convolution, batch norm, pooling and a linear layer."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return model.to(dtype), (torch.randn(8, 3, 32, 32, dtype=dtype), torch.randint(10, (8,)))


class Block(nn.Module):
    """Causal attention and a perceptron, as in GPT."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.second(x))))
        return x + F.dropout(y, self.dropout, self.training)


class Words(nn.Module):
    """A small GPT."""

    def __init__(self, depth: int = 2, width: int = 64, words: int = 96, dropout: float = 0.1) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(64, width))
        self.blocks = nn.Sequential(*(Block(width, 4, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(
            self.norm(self.blocks(self.table(tokens) + self.places[: tokens.shape[1]]))
        )
        return logits.transpose(1, 2)


def words(dtype: torch.dtype = torch.float32) -> Case:
    return Words().to(dtype), (torch.randint(96, (8, 64)), torch.randint(96, (8, 64)))


class Series(nn.Module):
    """A recurrent net."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(12, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


def series(dtype: torch.dtype = torch.float32) -> Case:
    return Series().to(dtype), (torch.randn(8, 16, 12, dtype=dtype), torch.randint(5, (8,)))


NETS = {"images": images, "words": words, "series": series}
