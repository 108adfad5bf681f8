"""Rows that are placed by a vector of indices, added up or reduced otherwise: messages along edges.

    index_add      "n& f&, e+, e+ f -> n f"      each rank adds up its edges; their sums are partial
    index_reduce   "n f, e., e. f -> n f"        largest, least, mean or product of rows: edges stay whole

The dim that rows are placed in stays whole: an index may name any of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register

aten = torch.ops.aten


def _labels(op: Instance) -> tuple[tuple[str | None, ...], tuple[str | None, ...], tuple[str | None, ...]]:
    """Of the tensor that rows are placed in, of the index and of the rows."""
    dim = op.dim(op["dim"])
    free = [f"d{here}" for here in range(len(op.shape()))]
    into = tuple(None if here == dim else label for here, label in enumerate(free))
    rows = tuple("e" if here == dim else label for here, label in enumerate(free))
    return into, ("e",) * len(op.shape(1)), rows[: len(op.shape(2))]


@register
class IndexAdd(Rule):
    """self + alpha x rows, at the rows of `dim` that the index names."""

    targets = (aten.index_add.default,)

    def equation(self, op: Instance) -> Equation:
        into, index, rows = _labels(op)
        linear = (frozenset({0, 2}),)
        return Equation((into, index, rows), (into,), {"e": Kind.CONTRACTED}, frozenset({0}), linear)

    def samples(self) -> Iterable[Sample]:
        index = torch.tensor([3, 0, 3, 1, 4, 4, 0])
        yield Sample(aten.index_add.default, (torch.randn(5, 4), 0, index, torch.randn(7, 4)))
        yield Sample(
            aten.index_add.default, (torch.randn(3, 5), -1, index, torch.randn(3, 7)), {"alpha": 0.5}
        )
        yield Sample(aten.index_add.default, (torch.zeros(5), 0, index, torch.randn(7)))


@register
class IndexReduce(Rule):
    """The extreme, mean or product of the rows that the index places at each row of `dim`."""

    targets = (aten.index_reduce.default,)

    def equation(self, op: Instance) -> Equation:
        into, index, rows = _labels(op)
        return Equation((into, index, rows), (into,), {"e": Kind.WHOLE})

    def lower(self, site: Site) -> Sequence[Handle]:
        """By scatter_reduce, which has faster kernels: the index is seen as one for each element."""
        into, index, rows = site.values
        dim, shape = site.dim(site["dim"]), site.emitter.shape(rows)
        seen = [size if here == dim else 1 for here, size in enumerate(shape)]
        index = site.call(aten.reshape.default, index, seen)
        index = site.call(aten.expand.default, index, list(shape))
        include = {"include_self": bool(site["include_self"])}
        args = (into, dim, index, rows, str(site["reduce"]))
        return (site.call(aten.scatter_reduce.two, *args, **include),)

    def samples(self) -> Iterable[Sample]:
        index = torch.tensor([3, 0, 3, 1, 4, 4, 0])
        for reduce in ("amax", "amin", "mean", "prod"):
            args = (torch.randn(5, 4), 0, index, torch.randn(7, 4), reduce)
            yield Sample(aten.index_reduce.default, args, {"include_self": reduce != "amax"})
