"""Softmax and its relatives: the soft-maxed dim is a statistic factor, all others are free.

    softmax      "n s v% -> n s v%"      exp(x - m) / sum exp(x - m)
    logsumexp    "n s v% -> n s"         m + log sum exp(x - m)

Sharded, m is the maximum over the axis, a constant of the derivative, and the sum is all-reduced:
P -> B for softmax, since each rank uses it for its shard; P -> R for logsumexp, whose result it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.statistics import cast, wide
from autopar.torch_seams.schemas import schema_of

aten = torch.ops.aten


def shifted(site: Site, value: Handle, dims: Sequence[int], axes: Sequence[int]) -> tuple[Handle, Handle]:
    """(x - m, m), with m the maximum over `dims` on all ranks along `axes`; 0 where that is infinite."""
    known = site.call(aten.detach.default, value)
    if site.has_empty_part():
        known = site.call(aten.constant_pad_nd.default, known, _one_more(site, value, dims), -math.inf)
    largest = site.call(aten.amax.default, known, list(dims), True)
    largest = site.reduce(largest, axes, target=torch.ops.autopar.max_reduce.default)
    largest = site.call(aten.masked_fill.Scalar, largest, site.call(aten.isinf.default, largest), 0.0)
    return site.call(aten.sub.Tensor, value, largest), largest


def _one_more(site: Site, value: Handle, dims: Sequence[int]) -> list[int]:
    """Pads `dims` by one element at their ends; pads count from the last dim."""
    rank = len(site.emitter.shape(value))
    along = {dim % rank for dim in dims}
    return [pad for dim in reversed(range(rank)) for pad in (0, int(dim in along))]


def sum_of_exponentials(site: Site, value: Handle, dims: Sequence[int]) -> Handle:
    """Sum exp x over the rank's part of `dims`, which are kept."""
    return site.call(aten.sum.dim_IntList, site.call(aten.exp.default, value), list(dims), True)


@register
class Softmax(Rule):
    """softmax and log_softmax over one dim."""

    targets = (aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        kinds = {labels[op.dim(op["dim"])]: Kind.STATISTIC} if labels else {}
        return Equation((labels,), (labels,), kinds)

    def lower(self, site: Site) -> Sequence[Any]:
        dim = site.dim(site["dim"])
        axes = site.sharding_axes(f"d{dim}")
        if not axes:
            return (site.local_call(),)
        dtype = site.result_dtype()
        value = cast(site, site.values[0], site.spec().dtype, wide(dtype))
        value, _ = shifted(site, value, [dim], axes)
        total = sum_of_exponentials(site, value, [dim])
        total = site.reduce(total, axes, target=torch.ops.autopar.p_to_b.default)
        if "log" in schema_of(site.operator.target).name:
            value = site.call(aten.sub.Tensor, value, site.call(aten.log.default, total))
        else:
            value = site.call(aten.div.Tensor, site.call(aten.exp.default, value), total)
        return (cast(site, value, wide(dtype), dtype),)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 5, 7) * 4 + 900
        yield Sample(aten.softmax.int, (x, -1))
        yield Sample(aten.softmax.int, (x, 1))
        yield Sample(aten.softmax.int, (torch.randn(5, 4).float(), 0, torch.float64))
        yield Sample(aten._softmax.default, (torch.randn(5), 0, False))
        yield Sample(aten.log_softmax.int, (x, 2))
        yield Sample(aten._log_softmax.default, (x, -3, False))
        masked = torch.randn(4, 6).masked_fill(
            torch.arange(6) >= torch.tensor([[2], [3], [5], [6]]), -torch.inf
        )
        yield Sample(aten.softmax.int, (masked, 1))


@register
class LogSumExp(Rule):
    """log sum exp over some dims."""

    targets = (aten.logsumexp.default,)

    def dims(self, op: Instance) -> list[int]:
        given = op["dim"] if op["dim"] else range(len(op.shape()))
        return sorted({op.dim(dim) for dim in ([given] if isinstance(given, int) else given)})

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        reduced = {labels[dim] for dim in self.dims(op)} if labels else set()
        result = tuple(None if label in reduced else label for label in labels)
        if not op["keepdim"]:
            result = tuple(label for label in result if label)
        return Equation((labels,), (result,), dict.fromkeys(reduced, Kind.STATISTIC))

    def lower(self, site: Site) -> Sequence[Any]:
        dims = self.dims(site)
        axes = site.sharding_axes(*(f"d{dim}" for dim in dims))
        if not axes:
            return (site.local_call(),)
        dtype = site.result_dtype()
        value = cast(site, site.values[0], site.spec().dtype, wide(dtype))
        value, largest = shifted(site, value, dims, axes)
        total = sum_of_exponentials(site, value, dims)
        total = site.reduce(total, axes, target=torch.ops.autopar.p_to_r.default)
        result = site.call(aten.add.Tensor, site.call(aten.log.default, total), largest)
        result = cast(site, result, wide(dtype), dtype)
        return (result if site["keepdim"] else site.call(aten.squeeze.dims, result, dims),)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 5, 7) + 800
        yield Sample(aten.logsumexp.default, (x, [-1]))
        yield Sample(aten.logsumexp.default, (x, [0, 2], True))
        yield Sample(aten.logsumexp.default, (torch.randn(6), [0]))
        yield Sample(aten.logsumexp.default, (torch.tensor([[0.0, -torch.inf, 1.0, 2.0]] * 3), [1]))
        yield Sample(aten.logsumexp.default, (torch.arange(10).view(2, 5), [1]))
