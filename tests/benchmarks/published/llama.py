"""A Llama: rotary attention and a gated MLP, each after a root-mean-square norm and around a residual."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.published.runs import Shape

BLOCK, HEAD = "blocks.0", ("norm", "head")  # how the layers of the three pieces are called


class Attention(nn.Module):
    """Causal attention; keys and values may have fewer heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.hidden // shape.heads
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.q = nn.Linear(shape.hidden, shape.heads * size, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * size, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * size, bias=False)
        self.o = nn.Linear(shape.heads * size, shape.hidden, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for layer in (self.k, self.v))
        grouped = self.heads != self.kv_heads
        q, k = turned(q, angles), turned(k, angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return cast(Tensor, self.o(mixed.transpose(1, 2).flatten(2)))


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    cos, sin = angles
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class Mlp(nn.Module):
    """A gated SiLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.before_attention(x), angles)
        return cast(Tensor, x + self.mlp(self.before_mlp(x)))


class Llama(nn.Module):
    """Embedding, blocks, and a head of its own; gives the mean cross-entropy, from logits in float32."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(blocks))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(shape.sequence, shape.hidden // shape.heads))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(shape: Shape, samples: int, blocks: int = 1) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model in bfloat16 with one batch, on the meta device."""
    with torch.device("meta"):
        model = Llama(shape, blocks).bfloat16()
        tokens = torch.zeros(samples, shape.sequence, dtype=torch.long)
    return model, (tokens, tokens)


def pins(tp: int) -> dict[str, tuple[str]]:
    """Megatron's tensor parallelism with sequence parallelism and a vocabulary in parts, by layer."""
    if tp == 1:
        return {}
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    found = {f"{BLOCK}.{name}": ("o",) for name in columns}
    found |= {f"{BLOCK}.{name}": ("i",) for name in ("attention.o", "mlp.down")}
    found |= dict.fromkeys((f"{BLOCK}.before_attention", f"{BLOCK}.before_mlp", "norm"), ("n1",))
    return found | {"embed": ("v",), "head": ("o",), "cross_entropy_loss": ("c",)}
