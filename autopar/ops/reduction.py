"""Reductions: kept dims are free.

sum    "n s+ -> n"     a partial sum leaves, for whoever needs it to add up
mean   "n s+ -> n"     the local sum over the *global* count
histc  "s+ -> b"       counts of parts add up where bins are given
others "n s. -> n"     (extrema, moments, norms, sorts, scans) want the reduced dims whole
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.core.operator_facts import declare
from autopar.sharding.equation import Equation, Kind, Labels
from autopar.sharding.rule import Instance, Rule, Sample, Site, register

aten = torch.ops.aten


def reduced_dims(op: Instance) -> frozenset[int]:
    """The dims that the call reduces, from the front; no `dim`, or an empty one, means all."""
    given = op.arguments.get("dim")
    everything = range(len(op.shape()))
    dims = everything if given is None or given == [] else [given] if isinstance(given, int) else given
    return frozenset(op.dim(dim) for dim in dims) if op.shape() else frozenset()


def labels_of(op: Instance) -> tuple[Labels, Labels]:
    """Labels of the operand, and of a result that loses (or keeps with length 1) the reduced dims."""
    labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
    gone = reduced_dims(op)
    if op.arguments.get("keepdim"):
        return labels, tuple(None if dim in gone else label for dim, label in enumerate(labels))
    return labels, tuple(label for dim, label in enumerate(labels) if dim not in gone)


class _Adding(Rule):
    """Rules for sum and mean."""

    def equation(self, op: Instance) -> Equation:
        labels, result = labels_of(op)
        kinds = {f"d{dim}": Kind.CONTRACTED for dim in reduced_dims(op)}
        linear = (frozenset({0}),) if op["dtype"] in (None, op.spec().dtype) else ()
        return Equation((labels,), (result,), kinds, linear=linear)


@register
class Sum(_Adding):
    """Sums over some dims or all."""

    targets = (aten.sum.default, aten.sum.dim_IntList)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 5, 7)
        yield Sample(aten.sum.default, (x,))
        yield Sample(aten.sum.dim_IntList, (x, [-1]))
        yield Sample(aten.sum.dim_IntList, (x, [0, 2], True))
        yield Sample(aten.sum.dim_IntList, (x, None))
        yield Sample(aten.sum.dim_IntList, (x, []))
        yield Sample(aten.sum.default, (torch.arange(6),))
        yield Sample(aten.sum.dim_IntList, (x > 0, [1]))
        yield Sample(aten.sum.default, (torch.tensor(2.0),))


@register
class Mean(_Adding):
    """Means over some dims or all."""

    targets = (aten.mean.default, aten.mean.dim)

    def lower(self, site: Site) -> Sequence[Any]:
        gone = sorted(reduced_dims(site))
        if not site.sharding_axes(*(f"d{dim}" for dim in gone)):
            return (site.local_call(),)
        sizes, local = site.shape(), site.emitter.shape(site.values[0])
        count = math.prod(sizes[dim] for dim in gone)
        if site.has_empty_part():  # of which there is a sum, but no mean
            keeps, dtype = bool(site.arguments.get("keepdim")), site["dtype"]
            total = site.call(aten.sum.dim_IntList, site.values[0], gone, keeps, dtype=dtype)
            return (site.call(aten.mul.Scalar, total, 1 / count),)
        share = math.prod(local[dim] for dim in gone) / count
        return (site.call(aten.mul.Scalar, site.local_call(), share),)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 5, 7)
        yield Sample(aten.mean.default, (x,))
        yield Sample(aten.mean.dim, (x, [-2, 2]))
        yield Sample(aten.mean.dim, (x, [1], True))
        yield Sample(aten.mean.dim, (x, None))
        yield Sample(aten.mean.default, (torch.arange(6),), {"dtype": torch.float64})


@register
class Histogram(Rule):
    """Counts by bins; where the call gives no bounds they are those of all elements."""

    targets = (aten.histc.default,)

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        kind = Kind.CONTRACTED if op["min"] < op["max"] else Kind.WHOLE
        return Equation((labels,), ((None,),), dict.fromkeys(labels, kind))

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 5)
        yield Sample(aten.histc.default, (x, 4, -1.0, 1.5))
        yield Sample(aten.histc.default, (x, 4))
        yield Sample(aten.histc.default, (torch.arange(6.0) % 3, 3, 0, 2))


@register
class WholeReduction(Rule):
    """Extrema, moments, norms, products, any and all: the reduced dims are whole."""

    targets = (
        aten.amax.default,
        aten.amin.default,
        aten.max.default,
        aten.min.default,
        aten.max.dim,
        aten.min.dim,
        aten.argmax.default,
        aten.argmin.default,
        aten.var.default,
        aten.var.dim,
        aten.var.correction,
        aten.std.default,
        aten.std.dim,
        aten.std.correction,
        aten.var_mean.correction,
        aten.linalg_vector_norm.default,
        aten.norm.Scalar,
        aten.norm.ScalarOpt_dim,
        aten.prod.default,
        aten.prod.dim_int,
        aten.any.default,
        aten.any.dim,
        aten.any.dims,
        aten.all.default,
        aten.all.dim,
        aten.all.dims,
        aten.count_nonzero.default,
        aten.count_nonzero.dim_IntList,
        aten.median.default,
        aten.median.dim,
        aten.nanmedian.dim,
        aten.mode.default,
        aten.kthvalue.default,
        aten.quantile.scalar,
        aten.nanquantile.scalar,
        aten.nansum.default,
        aten.nanmean.default,
        aten.std_mean.correction,
    )

    def equation(self, op: Instance) -> Equation:
        labels, result = labels_of(op)
        kinds = {f"d{dim}": Kind.WHOLE for dim in reduced_dims(op)}
        return Equation((labels,), (result,) * op.num_results, kinds)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 5, 7)
        yield Sample(aten.amax.default, (x, [-1]))
        yield Sample(aten.amin.default, (x, [0, 1], True))
        yield Sample(aten.max.default, (x,))
        yield Sample(aten.max.dim, (x, 1))
        yield Sample(aten.min.dim, (x, -1, True))
        yield Sample(aten.argmax.default, (x, 1))
        yield Sample(aten.argmax.default, (x,))
        yield Sample(aten.var.correction, (x, [1]), {"correction": 0, "keepdim": True})
        yield Sample(aten.std.correction, (x, [-1]))
        yield Sample(aten.var_mean.correction, (x, [2]))
        yield Sample(aten.linalg_vector_norm.default, (x, 2, [1]))
        yield Sample(aten.prod.dim_int, (x, 0))
        yield Sample(aten.any.dim, (x > 1, 2))
        yield Sample(aten.all.default, (x > 1,))
        yield Sample(aten.median.dim, (x, 1))
        yield Sample(aten.kthvalue.default, (x, 2, -1, True))
        yield Sample(aten.quantile.scalar, (x, 0.3, 1))
        yield Sample(aten.quantile.scalar, (x, 0.3))
        yield Sample(aten.nanmean.default, (x, [1]))


@register
class Scan(Rule):
    """Scans and sorts along one dim, which stays, whole."""

    targets = (
        aten.cumsum.default,
        aten.cumprod.default,
        aten.logcumsumexp.default,
        aten.cummax.default,
        aten.cummin.default,
        aten.sort.default,
        aten.sort.stable,
        aten.argsort.default,
        aten.topk.default,
    )

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        along = labels[op.dim(op["dim"])] if labels else None
        kept = tuple(None if label == along else label for label in labels)
        return Equation((kept,), (kept,) * op.num_results)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 5, 7)
        yield Sample(aten.cumsum.default, (x, 1))
        yield Sample(aten.cumprod.default, (x, -1))
        yield Sample(aten.sort.default, (x, 0, True))
        yield Sample(aten.sort.stable, (x,), {"stable": True, "dim": -1})
        yield Sample(aten.topk.default, (x, 3))
        yield Sample(aten.cummax.default, (x, 1))


declare(aten.sum, sum_of=1)
declare(aten.mean, is_mean=True)
declare(aten.var.dim, aten.var.correction, aten.std.dim, aten.std.correction, is_moment=True)
declare(aten.var_mean.correction, aten.linalg_vector_norm, aten.norm.ScalarOpt_dim, is_moment=True)
declare(aten.argmax, aten.argmin, aten.histc, has_gradient=False)
