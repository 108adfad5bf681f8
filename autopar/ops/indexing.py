"""Elements picked or placed by index tensors.

    index_select   "n v. d, i -> n i d"        gather   "n v+ , n i -> n i"

The dim that is indexed stays whole, as an index may name any of its rows; or, of a gather, each rank picks
what it has, zeros elsewhere, and the results are summed. The indices themselves are a free factor of the
result that the source lacks, so their ranks share the source and its gradient is a sum over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.core.graph import Ref
from autopar.core.operator_facts import declare
from autopar.core.placement import Shard
from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation, Kind, Labels
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register

aten = torch.ops.aten


def broadcast_labels(shape: Sequence[int], result: Sequence[int], prefix: str) -> Labels:
    """Labels of an operand that is broadcast to `result`: none where it has size 1 and that hasn't."""
    lead = len(result) - len(shape)
    return tuple(
        f"{prefix}{lead + dim}" if size == result[lead + dim] else None for dim, size in enumerate(shape)
    )


def rows_along(site: Site, operand: int, dim: int) -> tuple[int, int]:
    """The rows [start, stop) of an operand's dim that the rank has: its outer atom alone is split."""
    name = site.operands[operand]
    inner = math.prod(site.dims.atoms.of[name][dim][1:])
    start, stop = site.dims.rows(name, Shard(dim), site.operand_layout(operand), site.coordinate)
    return start * inner, stop * inner


def local_index(site: Site, index: Handle, operand: int, dim: int) -> tuple[Handle, Handle]:
    """An index counted from the rank's first row of an operand's dim, 0 where another rank has the row; and
    where that is."""
    start, stop = rows_along(site, operand, dim)
    before = site.call(aten.lt.Scalar, index, start)
    foreign = site.call(aten.logical_or.default, before, site.call(aten.ge.Scalar, index, stop))
    return site.call(aten.masked_fill.Scalar, site.call(aten.sub.Scalar, index, start), foreign, 0), foreign


@register
class IndexSelect(Rule):
    """Rows of one dim by a vector of indices."""

    targets = (aten.index_select.default,)

    def equation(self, op: Instance) -> Equation:
        dim = op.dim(op["dim"])
        labels = tuple(None if here == dim else f"d{here}" for here in range(len(op.shape())))
        index = ("i",) * len(op.shape(1))
        result = (*labels[:dim], "i" if index else None, *labels[dim + 1 :])
        return Equation((labels, index), (result[: len(op.result_shape())],), linear=(frozenset({0}),))

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.index_select.default, (torch.randn(5, 4, 6), 1, torch.tensor([3, 0, 3, 1, 2, 2])))
        yield Sample(aten.index_select.default, (torch.randn(5, 4), -1, torch.tensor([1, 1, 0])))


@register
class Gather(Rule):
    """One row of `dim` for each element of the index."""

    targets = (aten.gather.default,)

    def equation(self, op: Instance) -> Equation:
        dim, source, index = op.dim(op["dim"]), op.shape(0), op.shape(1)
        picked = tuple(
            f"d{here}" if here == dim or source[here] == size else None for here, size in enumerate(index)
        )
        along = "v" if op.spec().dtype is not torch.bool else None  # truth values don't add up
        given = tuple(along if here == dim else label for here, label in enumerate(picked))
        return Equation((given, picked), (picked,), {"v": Kind.CONTRACTED}, linear=(frozenset({0}),))

    def depth_of(self, op: Instance, equation: Equation, factor: str, atoms: Atoms) -> int:
        depth = super().depth_of(op, equation, factor, atoms)
        return min(depth, 1) if factor == "v" else depth  # a rank's rows are one range

    def lower(self, site: Site) -> Sequence[Any]:
        if not site.axes("v"):
            return (site.local_call(),)
        local, foreign = local_index(site, site.values[1], 0, site.dim(site["dim"]))
        return (site.call(aten.masked_fill.Scalar, site.local_call(index=local), foreign, 0),)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 4, 6)
        yield Sample(aten.gather.default, (x, 1, torch.randint(0, 4, (5, 7, 6))))
        yield Sample(aten.gather.default, (x > 0, 1, torch.randint(0, 4, (5, 7, 6))))
        yield Sample(aten.gather.default, (x, -1, torch.randint(0, 6, (3, 4, 5))))


@register
class TakeAlongDim(Rule):
    """Gather with broadcasting; without a dim both are flattened and nothing is free."""

    targets = (aten.take_along_dim.default,)

    def equation(self, op: Instance) -> Equation:
        result = op.result_shape()
        if op["dim"] is None:
            return Equation(((None,) * len(op.shape(0)), (None,) * len(op.shape(1))), ((None,),))
        dim = op.dim(op["dim"])
        source = broadcast_labels(op.shape(0), result, "d")
        given = tuple(None if here == dim else label for here, label in enumerate(source))
        everywhere = tuple(f"d{here}" for here in range(len(result)))
        picked = broadcast_labels(op.shape(1), result, "d")
        return Equation((given, picked), (everywhere,), linear=(frozenset({0}),))

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 4, 6)
        yield Sample(aten.take_along_dim.default, (x, torch.randint(0, 4, (1, 3, 6)), 1))
        yield Sample(aten.take_along_dim.default, (x, torch.randint(0, 120, (7,))))


@register
class Scatter(Rule):
    """Elements placed (or added) at rows of `dim` named by the index."""

    targets = (aten.scatter.src, aten.scatter.value, aten.scatter_add.default)

    def equation(self, op: Instance) -> Equation:
        dim = op.dim(op["dim"])
        shapes = [op.shape(index) for index in range(len(op.operands))]
        labels = tuple(
            f"d{here}" if here != dim and len(set(sizes)) == 1 else None
            for here, sizes in enumerate(zip(*shapes, strict=True))
        )
        places_zero = op.arguments.get("value") == 0
        linear = (frozenset({0, 2}),) if op.has("src") else (frozenset({0}),) if places_zero else ()
        return Equation((labels,) * len(shapes), (labels,), linear=linear)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 7, 4)
        index = torch.stack([torch.randperm(7)[:3] for _ in range(20)]).reshape(5, 4, 3).transpose(1, 2)
        yield Sample(aten.scatter.src, (x, 1, index.contiguous(), torch.randn(5, 3, 4)))
        yield Sample(aten.scatter.value, (x, 1, index[:4].contiguous(), 2.0))
        yield Sample(aten.scatter.value, (x, 1, index.contiguous(), 0))
        yield Sample(aten.scatter_add.default, (x, -2, index.contiguous() % 2, torch.randn(5, 3, 4)))


@register
class Index(Rule):
    """x[:, i, j]: whole dims by index tensors that are broadcast together, the other dims free.

    The index dims stand where the indexed ones stood, in front if those weren't neighbours. Boolean
    masks give sizes that depend on values and are never traced.
    """

    targets = (aten.index.Tensor,)

    def equation(self, op: Instance) -> Equation:
        indexed = [dim for dim, item in enumerate(op["indices"]) if isinstance(item, Ref)]
        source = tuple(None if dim in indexed else f"d{dim}" for dim in range(len(op.shape())))
        count = len(op.result_shape()) - (len(source) - len(indexed))
        together = indexed[-1] - indexed[0] + 1 == len(indexed)
        at = indexed[0] if together else 0
        free = [label for label in source if label]
        picked = tuple(f"i{here}" for here in range(count))
        indices = [
            broadcast_labels(op.shape(1 + index), op.result_shape()[at : at + count], "i")
            for index in range(len(indexed))
        ]
        result = (*free[:at], *picked, *free[at:])
        return Equation((source, *indices), (result,), linear=(frozenset({0}),))

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 4, 6)
        yield Sample(aten.index.Tensor, (x, [torch.randint(0, 5, (7,))]))
        yield Sample(aten.index.Tensor, (x, [None, torch.randint(0, 4, (3, 5))]))
        yield Sample(aten.index.Tensor, (x, [torch.randint(0, 5, (3, 1)), torch.randint(0, 4, (6,))]))
        yield Sample(aten.index.Tensor, (x, [torch.randint(0, 5, (4,)), None, torch.randint(0, 6, (3, 4))]))


@register
class OneHot(Rule):
    """A new last dim of `num_classes` zeros and one 1."""

    targets = (aten.one_hot.default,)

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        return Equation((labels,), ((*labels, None),))

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.one_hot.default, (torch.randint(0, 4, (5, 3)), 4))


declare(aten.index_select, aten.index, aten.gather, gathers=True)
declare(
    aten.index.Tensor,
    indexed_dims=lambda item: [dim for dim, index in enumerate(item.args[1]) if index is not None],
)
declare(
    aten.index_select,
    aten.index.Tensor,
    aten.index_put,
    aten.scatter_add,
    aten.scatter_reduce.two,
    indexed=True,
)
declare(aten.scatter_add, aten.scatter_reduce.two, places_by=2)
