"""Operator families, one file each; importing the package registers them all."""

from autopar.ops import (
    attention,
    batch_norm,
    convolution,
    embedding,
    gating,
    indexing,
    linear,
    loss,
    normalization,
    pointwise,
    pooling,
    rearrange,
    reduction,
    resize,
    softmax,
    views,
)

__all__ = [
    "attention",
    "batch_norm",
    "convolution",
    "embedding",
    "gating",
    "indexing",
    "linear",
    "loss",
    "normalization",
    "pointwise",
    "pooling",
    "rearrange",
    "reduction",
    "resize",
    "softmax",
    "views",
]
