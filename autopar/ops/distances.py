"""Distances and likenesses of vectors: what they are summed over is whole.

cdist               "b p m., b r m. -> b p r"
cosine_similarity   "n d. , n d. -> n"
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.ops.indexing import broadcast_labels
from autopar.sharding.equation import Equation
from autopar.sharding.rule import Instance, Rule, Sample, register

aten = torch.ops.aten


@register
class Distances(Rule):
    """Distances of each vector of one set to each of another."""

    targets = (aten.cdist.default,)

    def equation(self, op: Instance) -> Equation:
        batch = op.result_shape()[:-2]
        ours, theirs = (broadcast_labels(op.shape(index)[:-2], batch, "b") for index in (0, 1))
        everywhere = tuple(f"b{dim}" for dim in range(len(batch)))
        return Equation(((*ours, "p", None), (*theirs, "r", None)), ((*everywhere, "p", "r"),))

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.cdist.default, (torch.randn(3, 5, 4), torch.randn(3, 7, 4)))
        yield Sample(aten.cdist.default, (torch.randn(5, 4), torch.randn(3, 7, 4), 1.0))


@register
class Pairs(Rule):
    """The likeness or distance of each vector to that at the same place."""

    targets = (aten.cosine_similarity.default, aten.pairwise_distance.default)

    def equation(self, op: Instance) -> Equation:
        full = torch.broadcast_shapes(op.shape(0), op.shape(1))
        along = op.arguments.get("dim", -1) % max(1, len(full))
        labels = [broadcast_labels(op.shape(index), full, "d") for index in (0, 1)]
        ours, theirs = (tuple(None if label == f"d{along}" else label for label in each) for each in labels)
        kept = op.arguments.get("keepdim", False)
        result = [None if dim == along else f"d{dim}" for dim in range(len(full)) if kept or dim != along]
        return Equation((ours, theirs), (tuple(result),))

    def samples(self) -> Iterable[Sample]:
        x, y = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
        yield Sample(aten.cosine_similarity.default, (x, y, 1))
        yield Sample(aten.cosine_similarity.default, (x, y[:1, :, :1].contiguous(), -1))
        yield Sample(aten.pairwise_distance.default, (x, y, 2.0, 1e-6, True))
        yield Sample(aten.pairwise_distance.default, (x, y[0].contiguous()))
