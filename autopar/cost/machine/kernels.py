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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from autopar.core.costs import Kernels
from autopar.core.graph import Call
from costdb import operands
from costdb.footprint import footprint

ATEN = torch.ops.aten
TILES = ((256, 128, 1.0), (128, 128, 0.9), (64, 64, 0.6))  # rows, columns, part of the rate
K0 = 128  # multiply-adds for each element of a tile
CAUSAL = 5  # the argument's position in scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Product:
    """`batch` products of m x k and k x n."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def left(self) -> Product:
        """Of the gradient of its first operand."""
        return Product(self.batch, self.m, self.k, self.n)

    @property
    def right(self) -> Product:
        """Of the gradient of its second operand."""
        return Product(self.batch, self.k, self.n, self.m)

    def seconds(self, rate: float, units: int) -> float:
        """Where large products reach `rate` flop/s on so many multiprocessors."""
        return min(self._in_tiles(rate, units, *tile) for tile in TILES)

    def _in_tiles(self, rate: float, units: int, rows: int, columns: int, part: float) -> float:
        tiles = self.batch * math.ceil(self.m / rows) * math.ceil(self.n / columns)
        splits = max(1, min(units // tiles, self.k // K0))
        waves = math.ceil(tiles * splits / units)
        return waves * units * 2 * rows * columns * (self.k / splits + K0) / (rate * part)


def work_seconds(call: Call, kernels: Kernels, rate: float, *, backward: bool) -> float | None:
    """Seconds of a call's products in one pass, beside its traffic; None for calls of another form."""
    packet = call.target.overloadpacket
    if packet is ATEN.scaled_dot_product_attention:
        return _attention_seconds(call, kernels, rate, backward=backward)
    if packet not in _FORMS:
        return None
    form, left, right = _FORMS[packet]
    product, given = form(call, left, right), operands.specs(call)
    if not backward:
        return product.seconds(rate, kernels.units)
    pairs = (given[left], product.left), (given[right], product.right)
    return sum(each.seconds(rate, kernels.units) for spec, each in pairs if spec.requires_grad)


def rate_of(call: Call, kernels: Kernels, rate: float) -> float:
    """Flop/s of the call's products, of `rate` by its dtype."""
    is_single = operands.specs(call)[0].dtype is torch.float32
    is_convolution = call.target.overloadpacket in CONVOLUTIONS
    return max(rate, kernels.tf32) if is_single and is_convolution else rate


def _attention_seconds(call: Call, kernels: Kernels, rate: float, *, backward: bool) -> float:
    q, k, v = operands.specs(call)[:3]
    causal = call.kwargs.get("is_causal", call.args[CAUSAL] if len(call.args) > CAUSAL else False)
    scores = q.numel // q.shape[-1] * k.shape[-2] / (2 if causal else 1)
    e, d = q.shape[-1], v.shape[-1]
    products = 3 * e + 2 * d if backward else e + d  # the scores once more
    part = kernels.attention_backward if backward else kernels.attention
    return 2 * scores * products / (rate * part)


Form: TypeAlias = Callable[[Call, int, int], Product]


def _matrices(call: Call, left: int, right: int) -> Product:
    """A product of the operands at two positions, the second as it is."""
    given = operands.specs(call)
    return _joined(given[left].shape, given[right].shape, given[right].shape[-1])


def _linear(call: Call, left: int, right: int) -> Product:
    """A product with the transpose of the second operand."""
    given = operands.specs(call)
    return _joined(given[left].shape, given[right].shape, given[right].shape[0])


def _joined(left: tuple[int, ...], right: tuple[int, ...], columns: int) -> Product:
    rows = math.prod(left[:-1])
    batch = math.prod(right[:-2])
    if batch == 1:
        return Product(1, rows, columns, left[-1])
    return Product(batch, max(1, rows // batch), columns, left[-1])


def _convolution(call: Call, left: int, right: int) -> Product:
    x, w = operands.specs(call)[:2]
    result = footprint(call).results[0]
    assert result is not None, "a convolution gives a tensor"
    groups = max(1, x.shape[1] // w.shape[1])
    positions = result.numel // result.shape[1]
    return Product(groups, positions, max(1, w.shape[0] // groups), w.numel // w.shape[0])


def _transposed(call: Call, left: int, right: int) -> Product:
    x, w = operands.specs(call)[:2]
    return Product(1, x.numel // x.shape[1], w.numel // w.shape[0], x.shape[1])


def _any_convolution(call: Call, left: int, right: int) -> Product:
    """aten.convolution(x, w, bias, stride, padding, dilation, transposed, ...)."""
    return (_transposed if call.args[6] else _convolution)(call, left, right)


_FORMS: dict[Any, tuple[Form, int, int]] = {
    ATEN.mm: (_matrices, 0, 1),
    ATEN.bmm: (_matrices, 0, 1),
    ATEN.linear: (_linear, 0, 1),
    ATEN.addmm: (_matrices, 1, 2),
    ATEN.baddbmm: (_matrices, 1, 2),
    ATEN.conv1d: (_convolution, 0, 1),
    ATEN.conv2d: (_convolution, 0, 1),
    ATEN.conv3d: (_convolution, 0, 1),
    ATEN.conv_transpose1d: (_transposed, 0, 1),
    ATEN.conv_transpose2d: (_transposed, 0, 1),
    ATEN.conv_transpose3d: (_transposed, 0, 1),
    ATEN.convolution: (_any_convolution, 0, 1),
}
CONVOLUTIONS = {packet for packet, (form, *_) in _FORMS.items() if form not in (_matrices, _linear)}
