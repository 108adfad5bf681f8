"""Operator families, one file each; importing the package registers them all."""

from autopar.ops import (
    batch_norm,
    convolution,
    gating,
    indexing,
    linear,
    loss,
    pointwise,
    pooling,
    rearrange,
    resize,
    views,
)

__all__ = [
    "batch_norm",
    "convolution",
    "gating",
    "indexing",
    "linear",
    "loss",
    "pointwise",
    "pooling",
    "rearrange",
    "resize",
    "views",
]
