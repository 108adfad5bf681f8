"""Operator families, one file each; importing the package registers them all."""

from autopar.ops import batch_norm, convolution, linear, loss, pointwise, pooling, views

__all__ = ["batch_norm", "convolution", "linear", "loss", "pointwise", "pooling", "views"]
