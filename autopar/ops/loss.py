"""Losses: scalars that are global although the samples are sharded.

A sum over a sharded factor leaves as a partial sum. A mean divides by the *global* count, and a
cross-entropy with `ignore_index` or class weights by the global weight of the kept labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.ops.equation import Equation, Kind
from autopar.ops.rule import Instance, Rule, Sample, Site, register

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


@register
class ElementwiseLoss(Rule):
    """Losses of prediction and target of one shape, then a mean or a sum."""

    targets = (
        aten.mse_loss.default,
        aten.l1_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.binary_cross_entropy.default,
    )

    def equation(self, op: Instance) -> Equation:
        same = len({op.shape(index) for index in range(len(op.operands))}) == 1
        labels = tuple(f"d{dim}" if same else None for dim in range(len(op.shape())))
        operands = tuple(
            labels if same else (None,) * len(op.shape(index)) for index in range(len(op.operands))
        )
        if op["reduction"] == _NONE:
            return Equation(operands, (labels if same else (None,) * len(op.result_shape()),))
        return Equation(operands, ((),), {label: Kind.CONTRACTED for label in labels if label})

    def lower(self, site: Site) -> Sequence[Any]:
        if site["reduction"] != _MEAN or not any(option.shards for option in site.strategy):
            return (site.local_call(),)
        total = site.local_call(reduction=_SUM)
        return (site.call(aten.div.Scalar, total, site.spec().numel),)

    def samples(self) -> Iterable[Sample]:
        x, y = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
        yield Sample(aten.mse_loss.default, (x, y))
        yield Sample(aten.mse_loss.default, (x, y, _SUM))
        yield Sample(aten.mse_loss.default, (x, y, _NONE))
        yield Sample(aten.smooth_l1_loss.default, (x, y))
        yield Sample(aten.huber_loss.default, (x, y, _MEAN, 0.5))
        yield Sample(aten.binary_cross_entropy_with_logits.default, (x, torch.rand(3, 5, 7)))


@register
class CrossEntropy(Rule):
    """Softmax and negative log-likelihood over dim 1 (or 0 without a batch); targets are indices."""

    targets = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)

    def equation(self, op: Instance) -> Equation:
        x, y = op.shape(0), op.shape(1)
        dim = 1 if len(x) > 1 else 0
        labels = tuple("c" if here == dim else f"d{here}" for here in range(len(x)))
        rest = tuple(label for label in labels if label != "c")
        indices = not op.spec(1).dtype.is_floating_point
        if not indices or float(op.arguments.get("label_smoothing") or 0.0) or len(x) == 1:
            return Equation(
                tuple((None,) * len(op.shape(index)) for index in range(len(op.operands))),
                (tuple(None for _ in op.result_shape()),),
            )
        operands: tuple[tuple[str | None, ...], ...] = (labels, rest)
        if op.has("weight"):
            operands = (*operands, ("c",))
        kinds = {"c": Kind.WHOLE}
        if op["reduction"] == _NONE:
            return Equation(operands, (rest,), kinds)
        return Equation(operands, ((),), kinds | dict.fromkeys(rest, Kind.CONTRACTED))

    def lower(self, site: Site) -> Sequence[Any]:
        if site["reduction"] != _MEAN or not any(option.shards for option in site.strategy):
            return (site.local_call(),)
        total = site.local_call(reduction=_SUM)
        target = site.values[1]
        # The divisor: how many labels are kept, or their class weights, on all ranks together.
        kept = site.call(aten.ne.Scalar, target, int(site["ignore_index"]))
        if site.has("weight"):
            safe = site.call(aten.mul.Tensor, target, kept)
            weights = site.call(aten.index.Tensor, site.values[2], [safe])
            kept = site.call(aten.mul.Tensor, weights, kept)
        count = site.call(aten.sum.default, site.call(aten.to.dtype, kept, site.spec().dtype))
        axes = [axis for axis, option in enumerate(site.strategy) if option.shards]
        count = site.reduce(count, axes, target=torch.ops.autopar.p_to_r.default)
        return (site.call(aten.div.Tensor, total, count),)

    def samples(self) -> Iterable[Sample]:
        x, y = torch.randn(6, 5), torch.tensor([0, 4, -100, 2, 2, 1])
        yield Sample(aten.cross_entropy_loss.default, (x, y))
        yield Sample(aten.cross_entropy_loss.default, (x, y, None, _SUM))
        weighted = (x, y, torch.rand(5) + 0.5)
        yield Sample(aten.cross_entropy_loss.default, weighted, constant=("operand_2",))
        yield Sample(
            aten.cross_entropy_loss.default, (torch.randn(3, 5, 4), torch.randint(0, 5, (3, 4)), None, _NONE)
        )
        yield Sample(aten.cross_entropy_loss.default, (torch.randn(4, 5, 3, 2), torch.randint(0, 5, (4, 3, 2))))
        yield Sample(aten.nll_loss_nd.default, (torch.randn(6, 5), y))
