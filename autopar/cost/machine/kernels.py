"""Seconds of products on a GPU, by size: in tiles, which its multiprocessors take up in waves.

    batch x (m x k) (k x n)     tiles of u x v    ceil(m/u) ceil(n/v) batch of them, or several times as many,
                                                  with a part of k each, while that keeps all units busy
    seconds = ceil(tiles / units) 2 u v (k + K0) / (rate / units)

Of a few kinds of tiles the fastest; smaller ones read more for each multiply-add. K0 stands for a tile's
first loads and last stores. A convolution is the product m = samples x positions, n = filters, k = what a
filter sums; of its gradients each is one more product.

Fused attention takes its queries in tiles, walks through their keys, and reaches a rate of its own:

    head                        QUERIES ceil(q / QUERIES) (k + KEYS0) scores, half of the keys if causal
    part of wide heads' rate    1.5 e / (e + 64) of heads of e < 128 elements, and less where a mask is read

Source: NVIDIA, Matrix Multiplication Background User's Guide (tiles, waves); Dao, FlashAttention-2, 2023.
The efficiencies are estimates; those of attention follow calls measured on an H100 and an H200
(`costdb/devices`), half of which they meet within 33 % forward and 22 % backward.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch

from autopar.core.costs import Kernels
from autopar.core.graph import Call
from autopar.core.operator_facts import facts_of
from autopar.core.work import FusedScores, MatrixProduct, Multiplication
from autopar.cost.machine.flops import sized
from costdb import operands

TILES = ((256, 128, 1.0), (128, 128, 0.9), (64, 64, 0.6))  # rows, columns, part of the rate
K0 = 128  # multiply-adds for each element of a tile
QUERIES, KEYS0 = 64, 325  # of a tile of attention, and what it does beside, in keys
WIDE = 128  # elements of a head
MASKED = (0.45, 0.6)  # forward and backward, of the rate without a mask that lies in memory


def tile_seconds(product: MatrixProduct, rate: float, units: int) -> float:
    """Seconds of a product where large ones reach `rate` flop/s on so many multiprocessors."""
    return min(_in_tiles(product, rate, units, *tile) for tile in TILES)


def _in_tiles(product: MatrixProduct, rate: float, units: int, rows: int, columns: int, part: float) -> float:
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
            return _attention_seconds(work, kernels, rate, backward=backward)
        case Multiplication(product=product):
            if not backward:
                return tile_seconds(product, rate, kernels.units)
            pairs = (work.left, product.left), (work.right, product.right)
            return sum(tile_seconds(each, rate, kernels.units) for spec, each in pairs if spec.requires_grad)
        case _:
            assert_never(work)


def _attention_seconds(work: FusedScores, kernels: Kernels, rate: float, *, backward: bool) -> float:
    rows = QUERIES * math.ceil(work.queries / QUERIES)
    keys = min(work.keys, (work.keys + QUERIES) / 2) if work.causal else work.keys
    width = max(work.key, work.value)  # to which the kernels fill up the other
    products = 5 * width if backward else 2 * width
    part = kernels.attention_backward if backward else kernels.attention
    part *= min(1.0, 1.5 * width / (width + WIDE / 2)) * (MASKED[backward] if work.masked else 1.0)
    return 2 * work.heads * rows * (keys + KEYS0) * products / (rate * part)


def rate_of(call: Call, kernels: Kernels, rate: float) -> float:
    """Flop/s of the call's products, of `rate` by its dtype."""
    is_single = operands.specs(call)[0].dtype is torch.float32
    return max(rate, kernels.tf32) if is_single and facts_of(call.target).allows_tf32 else rate
