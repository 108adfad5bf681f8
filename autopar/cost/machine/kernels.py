"""Seconds of products on a GPU, by size: in tiles, which its multiprocessors take up in waves.

    batch x (m x k) (k x n)     tiles of u x v    ceil(m/u) ceil(n/v) batch of them, or several times as many,
                                                  with a part of k each, while that keeps all units busy
    seconds = ceil(tiles / units) 2 u v (k + K0) / (rate / units)

Of a few kinds of tiles the fastest; smaller ones read more for each multiply-add. K0 stands for a tile's
first loads and last stores. A convolution is the product m = samples x positions, n = filters, k = what a
filter sums; of its gradients each is one more product. Fused attention reaches a part of the rate of its own;
under a causal mask it does half of the work.

Source: NVIDIA, Matrix Multiplication Background User's Guide (tiles, waves); Dao, FlashAttention-2, 2023.
The efficiencies are estimates.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch

from autopar.core.costs import Kernels
from autopar.core.graph import Call
from autopar.core.operator_facts import facts_of
from autopar.core.work import FusedScores, Multiplication, Product
from autopar.cost.machine.flops import sized
from costdb import operands

TILES = ((256, 128, 1.0), (128, 128, 0.9), (64, 64, 0.6))  # rows, columns, part of the rate
K0 = 128  # multiply-adds for each element of a tile


def tile_seconds(product: Product, rate: float, units: int) -> float:
    """Seconds of a product where large ones reach `rate` flop/s on so many multiprocessors."""
    return min(_in_tiles(product, rate, units, *tile) for tile in TILES)


def _in_tiles(product: Product, rate: float, units: int, rows: int, columns: int, part: float) -> float:
    tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)
    splits = max(1, min(units // tiles, product.k // K0))
    waves = math.ceil(tiles * splits / units)
    return waves * units * 2 * rows * columns * (product.k / splits + K0) / (rate * part)


def work_seconds(call: Call, kernels: Kernels, rate: float, *, backward: bool) -> float | None:
    """Seconds of a call's products in one pass, beside its traffic; None for calls of another form."""
    form = facts_of(call.target).products
    if form is None:
        return None
    work = form(sized(call))
    match work:
        case FusedScores():
            products = 3 * work.key + 2 * work.value if backward else work.key + work.value
            part = kernels.attention_backward if backward else kernels.attention
            return 2 * work.count * products / (rate * part)
        case Multiplication(product=product):
            if not backward:
                return tile_seconds(product, rate, kernels.units)
            pairs = (work.left, product.left), (work.right, product.right)
            return sum(tile_seconds(each, rate, kernels.units) for spec, each in pairs if spec.requires_grad)
        case _:
            assert_never(work)


def rate_of(call: Call, kernels: Kernels, rate: float) -> float:
    """Flop/s of the call's products, of `rate` by its dtype."""
    is_single = operands.specs(call)[0].dtype is torch.float32
    return max(rate, kernels.tf32) if is_single and facts_of(call.target).allows_tf32 else rate
