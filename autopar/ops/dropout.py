"""Dropout of elements or of whole channels, plain or self-normalising.

    dropout               x · m                    m of x's shape: 0 or 1 / (1 - p)
    feature_dropout       x · m                    m of [N, C, 1, ...]: parts of one channel share it
    alpha_dropout         x · a·k + b (k)          k = (1 - p) m: 0 or 1; b (k) = α a (k - 1 + p)
    feature_alpha_dropout both

with a = 1 / sqrt((α² p + 1) (1 - p)). Source: Klambauer, Unterthiner, Mayr and Hochreiter, Self-normalizing
neural networks, 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.operator_facts import declare
from autopar.sharding.equation import Equation
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register

aten = torch.ops.aten

ALPHA = 1.7580993408473766  # scale of SELU times its alpha, as torch rounds it
_OF_FEATURES = (aten.feature_dropout.default, aten.feature_alpha_dropout.default)
_SELF_NORMALISING = (aten.alpha_dropout.default, aten.feature_alpha_dropout.default)


@register
class Dropout(Rule):
    """Each mask covers the dims that draw apart.

    Exact mode draws the serial mask, whole, on every rank (all generators must stand alike) and
    slices it. Otherwise each shard draws its own from a seed that replicas share; one device has its
    generator to itself.
    """

    targets = (aten.dropout.default, *_OF_FEATURES, aten.alpha_dropout.default)
    passes_layout_on = True
    random = True
    numbers_alike = True

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        linear = () if op.operator.target in _SELF_NORMALISING else (frozenset({0}),)
        return Equation((labels,), (labels,), linear=linear)

    def lower(self, site: Site) -> tuple[Any]:
        x, probability, training = site.values[0], float(site["p"]), bool(site["train"])
        if not training or probability == 0.0:
            return (x,)
        if not site.exact_random and site.mesh.num_devices == 1:
            return (site.local_call(),)
        mask = self.serial_mask(site, probability) if site.exact_random else self.mask(site, probability)
        if site.operator.target not in _SELF_NORMALISING or probability == 1.0:
            return (site.call(aten.mul.Tensor, x, mask),)
        a = 1 / math.sqrt((ALPHA**2 * probability + 1) * (1 - probability))
        kept = site.call(aten.mul.Scalar, mask, a * (1 - probability))
        shift = site.call(aten.mul.Scalar, kept, ALPHA)
        shift = site.call(aten.sub.Scalar, shift, ALPHA * a * (1 - probability))
        return (site.call(aten.add.Tensor, site.call(aten.mul.Tensor, x, kept), shift),)

    def drawn_dims(self, site: Site) -> range:
        """The dims along which a mask differs."""
        return range(2 if site.operator.target in _OF_FEATURES else len(site.shape()))

    def mask(self, site: Site, probability: float) -> Handle:
        """A mask that this shard draws."""
        index, dims = 0, self.drawn_dims(site)
        for axis in site.sharding_axes(*(f"d{dim}" for dim in dims)):
            index = index * site.mesh.shape[axis] + site.coordinate[axis]
        shape = _of_dims(site.emitter.shape(site.values[0]), dims)
        return site.draw(torch.ops.autopar.shard_mask.default, shape, probability, site.spec().dtype, index)

    def serial_mask(self, site: Site, probability: float) -> Handle:
        """The rank's part of the whole mask, drawn in the memory order of the serial operand."""
        spec, dims = site.spec(), self.drawn_dims(site)
        order = () if site.operator.target in _OF_FEATURES else site.operator.order
        shape = [spec.shape[dim] for dim in order] or _of_dims(spec.shape, dims)
        mask = site.draw(torch.ops.autopar.dropout_mask.default, shape, probability, spec.dtype)
        if order:
            mask = site.call(aten.permute.default, mask, [order.index(dim) for dim in range(len(order))])
        return site.slice_to(mask, site.operands[0], site.operand_layout(0), dims=dims)

    def samples(self) -> Iterable[Sample]:
        for target in self.targets:
            yield Sample(target, (torch.randn(5, 7, 3), 0.4, True))
            yield Sample(target, (torch.randn(5, 7, 3), 0.4, False))


def _of_dims(shape: Sequence[int], dims: range) -> list[int]:
    """The shape with 1 for all other dims."""
    return [size if dim in dims else 1 for dim, size in enumerate(shape)]


def _fused_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """GPUs save a mask of one byte an element; the composite saves one of x's dtype."""
    y: Tensor = (
        aten.native_dropout(x, p, train)[0] if train and p not in (0, 1) else aten.dropout(x, p, train)
    )
    return y


def _drops(args: Sequence[Any]) -> bool:
    """Whether dropout(x, p, train) drops anything."""
    return bool(args[1] and args[2])


declare(*Dropout.targets, is_identity=True, changes=_drops, gives_itself=True)
declare(aten.dropout, aten.alpha_dropout, order_matters=True)
declare(aten.dropout, on_gpu=_fused_dropout)
