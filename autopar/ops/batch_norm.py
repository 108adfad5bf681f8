"""Batch normalisation: n, h and w are statistic factors, c is free.

A rank combines the true local counts, means and squared deviations of all shards, never a mean of
means, so outputs, gradients and running statistics are those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.core.operator_facts import HiddenWrites, declare
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Instance, Rule, Sample, Site, register

aten = torch.ops.aten


@register
class BatchNorm(Rule):
    """batch_norm over (N, C, *) in training and evaluation."""

    targets = (aten.batch_norm.default,)

    def uses_batch(self, op: Instance) -> bool:
        return bool(op["training"]) or not op.has("running_mean")

    def equation(self, op: Instance) -> Equation:
        labels = ("n", "c", *(f"s{index}" for index in range(len(op.shape()) - 2)))
        if len(op.shape()) < len(labels):  # torch takes a single dim too
            return Equation(tuple((None,) for _ in op.operands), ((None,),))
        operands = (labels, *((("c",),) * (len(op.operands) - 1)))
        statistic = Kind.STATISTIC if self.uses_batch(op) else Kind.FREE
        kinds = {label: statistic for label in labels if label != "c"}
        return Equation(operands, (labels,), kinds)

    def lower(self, site: Site) -> Sequence[Any]:
        axes = [
            axis
            for axis in site.sharding_axes(*self.equation(site).factors())
            if not self._channels(site, axis)
        ]
        if not axes or not self.uses_batch(site):
            return (site.local_call(),)
        queue = iter(site.values[1:])
        named = [
            next(queue) if site.has(name) else None
            for name in ("weight", "bias", "running_mean", "running_var")
        ]
        shape = site.shape()
        count = shape[0] * math.prod(shape[2:])
        args = [site.values[0], *named, site.key(axes), count, float(site["momentum"]), float(site["eps"])]
        return (
            site.emitter.collective(
                torch.ops.autopar.batch_norm.default, args, site.emitter.shape(site.values[0])
            ),
        )

    def _channels(self, site: Site, axis: int) -> bool:
        return site.strategy[axis].factor.partition(".")[0] == "c"

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 6, 4, 7)
        weight, bias = torch.rand(6) + 0.5, torch.randn(6)
        mean, variance = torch.zeros(6), torch.ones(6)
        yield Sample(aten.batch_norm.default, (x, weight, bias, mean, variance, True, 0.1, 1e-5, False))
        yield Sample(
            aten.batch_norm.default, (x, weight, bias, mean + 0.3, variance * 2, False, 0.1, 1e-5, False)
        )
        yield Sample(
            aten.batch_norm.default, (torch.randn(7, 6), None, None, None, None, True, 0.1, 1e-5, False)
        )


declare(
    aten.batch_norm,
    joins_samples=True,
    hidden_writes=HiddenWrites(arguments=(3, 4), flag=5),
    casts_on_cuda=False,
)
