"""Embedding: rows of a table.

    embedding       "v+ e, n s -> n s e"    v: each rank holds some rows; e: some columns
    embedding_bag   ". e, ., . -> . e"      bags begin where values of a tensor say, so they stay together

With the rows sharded, an index that another rank owns gives zero, and the results are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.core.operator_facts import declare
from autopar.ops.indexing import local_index, rows_along
from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Instance, Rule, Sample, Site, register

aten = torch.ops.aten


@register
class Embedding(Rule):
    """weight[indices]; with `scale_grad_by_freq` or `sparse` it is gathered."""

    targets = (aten.embedding.default,)

    def equation(self, op: Instance) -> Equation:
        indices = tuple(f"n{dim}" for dim in range(len(op.shape(1))))
        if op["scale_grad_by_freq"] or op["sparse"]:
            return Equation(((None, None), (None,) * len(indices)), ((None,) * (len(indices) + 1),))
        kinds = {"v": Kind.CONTRACTED}
        return Equation((("v", "e"), indices), ((*indices, "e"),), kinds, linear=(frozenset({0}),))

    def depth_of(self, op: Instance, equation: Equation, factor: str, atoms: Atoms) -> int:
        depth = super().depth_of(op, equation, factor, atoms)
        return min(depth, 1) if factor == "v" else depth  # a rank's rows are one range

    def lower(self, site: Site) -> Sequence[Any]:
        if not site.axes("v"):
            return (site.local_call(),)
        weight, indices = site.values
        local, foreign = local_index(site, indices, 0, 0)
        start, stop = rows_along(site, 0, 0)
        padding = int(site["padding_idx"])
        padding = padding - start if start <= padding < stop else -1
        found = site.call(aten.embedding.default, weight, local, padding)
        return (
            site.call(aten.masked_fill.Scalar, found, site.call(aten.unsqueeze.default, foreign, -1), 0.0),
        )

    def samples(self) -> Iterable[Sample]:
        indices = torch.tensor([[0, 10, 3, 3], [7, 4, 9, 0], [5, 5, 5, 1]])
        yield Sample(aten.embedding.default, (torch.randn(11, 5), indices))
        for padding in (0, 3, 7, 10):
            yield Sample(aten.embedding.default, (torch.randn(11, 3), indices, padding))
        yield Sample(aten.embedding.default, (torch.randn(11, 3), indices, -1, True))
        yield Sample(aten.embedding.default, (torch.randn(8, 4), torch.tensor(5)))


@register
class EmbeddingBag(Rule):
    """Sums, means or maxima of rows of a table, bag by bag; with `sparse` it is gathered.

    The results after the first are the kernel's own notes.
    """

    targets = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)

    def equation(self, op: Instance) -> Equation:
        table = (None, None if op["sparse"] else "e")
        others = tuple((None,) * len(op.specs[name].shape) for name in op.operands[1:])
        return Equation((table, *others), (table, *[()] * (op.num_results - 1)))

    def samples(self) -> Iterable[Sample]:
        indices = torch.tensor([0, 10, 3, 3, 7, 4, 9, 0, 5])
        starts = torch.tensor([0, 2, 2, 6])
        table = torch.randn(11, 5)
        for mode in (0, 1, 2):
            yield Sample(aten.embedding_bag.default, (table, indices, starts, False, mode))
        yield Sample(aten.embedding_bag.padding_idx, (table, indices, starts, True, 1, False, None, False, 3))
        yield Sample(aten.embedding_bag.default, (table, indices, starts, False, 0, False, torch.randn(9)))


declare(aten.embedding, gathers=True)
declare(aten.embedding_bag, usable_results=1)  # the other shapes differ between devices
