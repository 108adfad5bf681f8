"""Activations that are more than elementwise: a slope for each channel, halves that gate each other.

prelu   "n c h w, c -> n c h w"          glu   "n (2 c) -> n c"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.sharding.atoms import Relation
from autopar.sharding.equation import Equation
from autopar.sharding.rule import Handle, Instance, Regroup, Rule, Sample, Site, register

aten = torch.ops.aten


@register
class PReLU(Rule):
    """Channels are dim 1; a single slope is shared by everything."""

    targets = (aten.prelu.default,)

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        per_channel = len(labels) > 1 and op.shape(1) == op.shape()[1:2]
        slope = ("d1",) if per_channel else (None,) * len(op.shape(1))
        return Equation((labels, slope), (labels,))

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.prelu.default, (torch.randn(3, 4, 5), torch.rand(4)))
        yield Sample(aten.prelu.default, (torch.randn(3, 4, 5), torch.rand(1)))


@register
class GLU(Regroup):
    """first half * sigmoid(second half) of one dim, which is refined into 2 x half."""

    targets = (aten.glu.default,)
    linear = False

    def relations(self, op: Instance) -> list[Relation]:
        before, after, along = op.operands[0], op.operator.results[0], op.dim(op["dim"])
        assert after is not None
        return [
            Relation(((before, dim),), (2, (after, dim)) if dim == along else ((after, dim),))
            for dim in range(len(op.shape()))
        ]

    def lower(self, site: Site) -> Sequence[Handle]:
        return (site.local_call(),)

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.glu.default, (torch.randn(3, 10, 4), 1))
        yield Sample(aten.glu.default, (torch.randn(3, 12), -1))
