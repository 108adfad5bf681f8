"""Operator families, one file each; importing the package registers them all."""

from autopar.ops import (
    attention,
    batch_norm,
    convolution,
    embedding,
    linear,
    loss,
    normalization,
    pointwise,
    reduction,
    softmax,
    views,
)

__all__ = [
    "attention",
    "batch_norm",
    "convolution",
    "embedding",
    "linear",
    "loss",
    "normalization",
    "pointwise",
    "reduction",
    "softmax",
    "views",
]
