"""Reductions: kept dims are free.

sum    "n s+ -> n"     a partial sum leaves, for whoever needs it to add up
mean   "n s+ -> n"     the local sum over the *global* count
histc  "s+ -> b"       counts of parts add up where bins are given
cumsum "n s> -> n s>"  the local one and the sum of what all ranks before have in all
scan   the same        once for the ranks' last states, and once more from the state of the rank before
others "n s. -> n"     (extrema, moments, norms, sorts, other scans) want the reduced dims whole
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.core.operator_facts import declare
from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation, Kind, Labels
from autopar.sharding.halo import place_along
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.trace.forms.linear_scan import SCAN

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
        yield Sample(aten.cumprod.default, (x, -1))
        yield Sample(aten.sort.default, (x, 0, True))
        yield Sample(aten.sort.stable, (x,), {"stable": True, "dim": -1})
        yield Sample(aten.topk.default, (x, 3))
        yield Sample(aten.cummax.default, (x, 1))


class HandedOn(Rule):
    """Scans whose state ranks hand on: each gives its last row, and takes what comes of those before it."""

    def along(self, op: Instance) -> int:
        return op.dim(op["dim"])

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        kinds = {labels[self.along(op)]: Kind.SCANNED} if labels else {}
        return Equation((labels,) * len(op.operands), (labels,), kinds)

    def depth_of(self, op: Instance, equation: Equation, factor: str, atoms: Atoms) -> int:
        depth = super().depth_of(op, equation, factor, atoms)
        scanned = equation.kind(factor) is Kind.SCANNED
        return min(depth, 1) if scanned else depth  # a rank's rows are one range

    def lower(self, site: Site) -> Sequence[Any]:
        if not site.shape() or not site.axes(f"d{self.along(site)}"):
            return (site.local_call(),)
        return (self.handed_on(site, self.along(site)),)

    @abstractmethod
    def handed_on(self, site: Site, dim: int) -> Handle:
        """The rank's rows of the scan."""

    def of_all(self, site: Site, row: Handle, dim: int) -> Handle:
        """One row of each rank, in order."""
        axes = site.axes(f"d{dim}")
        places = math.prod(site.mesh.shape[axis] for axis in axes)
        shape = list(site.emitter.shape(row))
        shape[dim] = places
        how = site.key(axes), dim, 1, [1] * places
        return site.emitter.collective(torch.ops.autopar.s_to_b.default, (row, *how), shape)

    def rows(self, site: Site, value: Handle, dim: int, start: int, stop: int) -> Handle:
        return site.call(aten.slice.Tensor, value, dim, start, stop)

    def last(self, site: Site, value: Handle, dim: int) -> Handle:
        length = site.emitter.shape(value)[dim]
        return self.rows(site, value, dim, length - 1, length)


@register
class CumulativeSum(HandedOn):
    """Sums of the rows so far."""

    targets = (aten.cumsum.default,)

    def handed_on(self, site: Site, dim: int) -> Handle:
        local = site.local_call()
        rows = self.of_all(site, self.last(site, local, dim), dim)
        before = self.rows(site, rows, dim, 0, place_along(site, f"d{dim}"))
        total = site.call(aten.sum.dim_IntList, before, [dim], True, dtype=site.result_dtype())
        return site.call(aten.add.Tensor, local, total)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 5, 7)
        yield Sample(aten.cumsum.default, (x, 1))
        yield Sample(aten.cumsum.default, (x > 0, -1), {"dtype": torch.int32})
        yield Sample(aten.cumsum.default, (torch.tensor(2.0), 0))


@register
class LinearScan(HandedOn):
    """States h = a h + b, one after the other: `autopar.scan`."""

    targets = (SCAN,)

    def handed_on(self, site: Site, dim: int) -> Handle:
        decay, update = site.values
        whole = site.call(aten.prod.dim_int, decay, dim, True)
        ends = self.last(site, site.local_call(), dim)
        states = site.call(SCAN, *(self.of_all(site, row, dim) for row in (whole, ends)), dim)
        place = place_along(site, f"d{dim}")
        before = self.rows(site, states, dim, max(0, place - 1), place)
        state = site.call(aten.sum.dim_IntList, before, [dim], True)  # 0 of no row
        a, b = (self.rows(site, x, dim, 0, 1) for x in (decay, update))
        first = site.call(aten.add.Tensor, b, site.call(aten.mul.Tensor, a, state))
        rest = self.rows(site, update, dim, 1, site.emitter.shape(update)[dim])
        return site.call(SCAN, decay, site.call(aten.cat.default, [first, rest], dim), dim)

    def samples(self) -> Iterable[Sample]:
        decay, update = torch.rand(3, 7, 2), torch.randn(3, 7, 2)
        yield Sample(SCAN, (decay, update, 1))
        yield Sample(SCAN, (decay.masked_fill(decay < 0.3, 0.0), update, 1))


declare(aten.sum, sum_of=1)
declare(aten.mean, is_mean=True)
declare(aten.var.dim, aten.var.correction, aten.std.dim, aten.std.correction, is_moment=True)
declare(aten.var_mean.correction, aten.linalg_vector_norm, aten.norm.ScalarOpt_dim, is_moment=True)
declare(aten.argmax, aten.argmin, aten.histc, has_gradient=False)
