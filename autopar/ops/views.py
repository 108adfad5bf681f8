"""Operators that only rename, reorder, cut out or join elements.

Reshapes, equal splits and equal cats are relations between dims (see dims.py): the halves of a
fused projection stay sharded by heads. Crops and pads are windows of one row, so that a sharded
image can be cropped where its skip connection needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from autopar.core.operator_facts import declare
from autopar.sharding.atoms import Relation
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.halo import fetch
from autopar.sharding.rule import Instance, Regroup, Rule, Sample, Site, register
from autopar.sharding.window import Window

aten = torch.ops.aten


def reshape_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of dims with equal products, left to right; dims of size 1 are left out.

    [4, 3, 8] -> [12, 2, 4] gives ([0, 1], [0]) and ([2], [1, 2]).
    """
    found: list[tuple[list[int], list[int]]] = []
    left = [dim for dim, size in enumerate(before) if size != 1]
    right = [dim for dim, size in enumerate(after) if size != 1]
    while left and right:
        ours, theirs = [left.pop(0)], [right.pop(0)]
        here, there = before[ours[0]], after[theirs[0]]
        while here != there:
            if here < there:
                ours.append(left.pop(0))
                here *= before[ours[-1]]
            else:
                theirs.append(right.pop(0))
                there *= after[theirs[-1]]
        found.append((ours, theirs))
    return found


@register
class Reshape(Regroup):
    """Gives the same elements in the same order under another shape."""

    is_view = True
    targets = (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    )

    def relations(self, op: Instance) -> list[Relation]:
        before, after = op.operands[0], op.operator.results[0]
        if after is None or op.specs[before].numel == 0:
            return []
        return [
            Relation(tuple((before, dim) for dim in ours), tuple((after, dim) for dim in theirs))
            for ours, theirs in reshape_groups(op.shape(0), op.result_shape())
        ]

    def lower(self, site: Site) -> Sequence[Any]:
        return (site.call(aten.reshape.default, site.values[0], list(site.local_result_shape())),)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(4, 6, 10)
        yield Sample(aten.view.default, (x, [24, 10]))
        yield Sample(aten.view.default, (x, [4, 6, 2, 5]))
        yield Sample(aten.reshape.default, (x, [4, -1]))
        yield Sample(aten.view.default, (x, [8, 3, 1, 10]))
        yield Sample(aten.flatten.using_ints, (x, 1, 2))
        yield Sample(aten.unsqueeze.default, (x, 1))
        yield Sample(aten.squeeze.dim, (torch.randn(4, 1, 5), 1))


@register
class Permute(Rule):
    """Dims in another order."""

    is_view = True
    targets = (
        aten.transpose.int,
        aten.permute.default,
        aten.t.default,
        aten.swapaxes.default,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.moveaxis.int,
        aten.moveaxis.intlist,
        aten.swapdims.default,
        aten.numpy_T.default,
        aten.mT.default,
        aten.mH.default,
        aten.adjoint.default,
        aten.matrix_H.default,
    )

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        target, args = op.operator.target, op.operator.args[1:]
        order = target(torch.empty([index + 2 for index in range(len(labels))], device="meta"), *args).shape
        return Equation((labels,), (tuple(labels[size - 2] for size in order),), linear=(frozenset({0}),))

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.transpose.int, (torch.randn(3, 4, 5), 1, -1))
        yield Sample(aten.permute.default, (torch.randn(3, 4, 5), [2, 0, 1]))
        yield Sample(aten.t.default, (torch.randn(5, 4),))
        yield Sample(aten.mT.default, (torch.randn(3, 4, 5),))
        yield Sample(aten.mH.default, (torch.randn(3, 4, 5, dtype=torch.complex128),))


@register
class Expand(Rule):
    """Broadcasting made explicit; the new extent is a factor that the operand lacks."""

    is_view = True
    targets = (aten.expand.default, aten.broadcast_to.default)

    def equation(self, op: Instance) -> Equation:
        result = op.result_shape()
        lead = len(result) - len(op.shape())
        source = tuple(
            f"d{dim}" if size == result[dim] else None for dim, size in enumerate(op.shape(), start=lead)
        )
        everywhere = tuple(f"d{dim}" for dim in range(len(result)))
        return Equation((source,), (everywhere,), linear=(frozenset({0}),))

    def lower(self, site: Site) -> Sequence[Any]:
        return (site.call(aten.expand.default, site.values[0], list(site.local_result_shape())),)

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.expand.default, (torch.randn(4, 1, 5), [3, 4, 6, 5]))


@register
class BroadcastTensors(Rule):
    """Each operand expanded to the shape of all together."""

    targets = (aten.broadcast_tensors.default,)

    def equation(self, op: Instance) -> Equation:
        result = op.result_shape()
        everywhere = tuple(f"d{dim}" for dim in range(len(result)))
        shapes = [op.shape(index) for index in range(len(op.operands))]
        operands = tuple(
            tuple(
                f"d{dim}" if size == result[dim] else None
                for dim, size in enumerate(shape, start=len(result) - len(shape))
            )
            for shape in shapes
        )
        return Equation(operands, (everywhere,) * op.num_results, linear=(frozenset(range(len(operands))),))

    def lower(self, site: Site) -> Sequence[Any]:
        return tuple(
            site.call(aten.expand.default, value, list(site.local_result_shape(index)))
            for index, value in enumerate(site.values)
        )

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.broadcast_tensors.default, ([torch.randn(4, 5), torch.randn(3, 1, 5)],))


@register
class Split(Regroup):
    """Parts along a dim; equal parts keep what is sharded inside each."""

    is_view = True
    targets = (
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.split.sizes,
    )

    def relations(self, op: Instance) -> list[Relation]:
        source, dim = op.operands[0], op.dim(op["dim"])
        unbind = op.operator.target is aten.unbind.int
        sizes = [1 if unbind else op.specs[name].shape[dim] for name in op.operator.results if name]
        found = []
        for name in filter(None, op.operator.results):
            for here in range(len(op.shape())):
                there = here - (unbind and here > dim)
                if here != dim:
                    found.append(Relation(((source, here),), ((name, there),)))
                elif not unbind and len(set(sizes)) == 1:
                    found.append(Relation(((source, here),), (len(sizes), (name, there))))
        return found

    def lower(self, site: Site) -> Sequence[Any]:
        if site.operator.target is aten.unbind.int:
            return tuple(site.local_call())
        dim = site.dim(site["dim"])
        sizes = [site.local_result_shape(index)[dim] for index in range(site.num_results)]
        return tuple(site.call(aten.split_with_sizes.default, site.values[0], sizes, dim))

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 12)
        yield Sample(aten.split.Tensor, (x, 4, 1))
        yield Sample(aten.split_with_sizes.default, (x, [5, 7], 1))
        yield Sample(aten.chunk.default, (x, 2, -1))
        yield Sample(aten.unbind.int, (torch.randn(3, 5, 4), 0))


@register
class Cat(Regroup):
    """Joined along a dim; equal parts keep what is sharded inside each."""

    targets = (aten.cat.default, aten.concat.default)

    def relations(self, op: Instance) -> list[Relation]:
        dim, result = op.dim(op["dim"]), op.operator.results[0]
        assert result is not None
        sizes = {op.shape(index)[dim] for index in range(len(op.operands))}
        found = []
        for name in op.operands:
            for here in range(len(op.shape())):
                if here != dim:
                    found.append(Relation(((name, here),), ((result, here),)))
                elif len(sizes) == 1:
                    found.append(Relation((len(op.operands), (name, here)), ((result, here),)))
        return found

    def lower(self, site: Site) -> Sequence[Any]:
        return (site.local_call(),)

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.cat.default, ([torch.randn(3, 4, 5), torch.randn(3, 4, 5)], 1))
        yield Sample(aten.cat.default, ([torch.randn(3, 4, 5), torch.randn(3, 6, 5)], 1))


@register
class Stack(Rule):
    """Joined along a new dim."""

    targets = (aten.stack.default,)

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        dim = int(op["dim"]) % (len(labels) + 1)
        everything = frozenset(range(len(op.operands)))
        result = (*labels[:dim], None, *labels[dim:])
        return Equation((labels,) * len(op.operands), (result,), linear=(everything,))

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.stack.default, ([torch.randn(5, 4), torch.randn(5, 4)], 1))


@register
class Select(Rule):
    """One index of a dim."""

    targets = (aten.select.int,)

    def equation(self, op: Instance) -> Equation:
        dim = op.dim(op["dim"])
        labels = tuple(None if here == dim else f"d{here}" for here in range(len(op.shape())))
        result = tuple(label for label in labels if label)
        return Equation((labels,), (result,), linear=(frozenset({0}),))

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.select.int, (torch.randn(5, 4, 6), 1, -1))


@register
class Slice(Rule):
    """Rows start, start + step, ... of one dim: a window of one row."""

    targets = (aten.slice.Tensor, aten.narrow.default)

    def bounds(self, op: Instance) -> tuple[int, int]:
        """(start, step) with start counted from the front."""
        length = op.shape()[op.dim(op["dim"])]
        start = op["start"] or 0
        start = max(0, min(length, start + length if start < 0 else start))
        return start, int(op.arguments.get("step") or 1)

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        start, step = self.bounds(op)
        factor = labels[op.dim(op["dim"])]
        window = {factor: Window(stride=step, padding=-start)}
        kinds = {factor: Kind.WINDOWED}
        return Equation((labels,), (labels,), kinds, linear=(frozenset({0}),), windows=window)

    def lower(self, site: Site) -> Sequence[Any]:
        dim = site.dim(site["dim"])
        if not site.axes(f"d{dim}"):
            return (site.local_call(),)
        start, step = self.bounds(site)
        value = fetch(site, site.values[0], dim, f"d{dim}", Window(stride=step, padding=-start))
        extent = site.emitter.shape(value)[dim]
        return (value if step == 1 else site.call(aten.slice.Tensor, value, dim, 0, extent, step),)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(4, 11, 3)
        yield Sample(aten.slice.Tensor, (x, 1, 2, 9))
        yield Sample(aten.slice.Tensor, (x, 1, 1, 9223372036854775807, 3))
        yield Sample(aten.slice.Tensor, (x, 1, -6, -1, 2))
        yield Sample(aten.narrow.default, (x, 1, 3, 5))


@register
class Pad(Rule):
    """Constant padding (or cropping, where the pad is negative); other modes keep their dims whole."""

    targets = (aten.constant_pad_nd.default, aten.pad.default)

    def pads(self, op: Instance) -> dict[int, int]:
        """Rows added in front of each padded dim."""
        pad, rank = list(op["pad"]), len(op.shape())
        pairs = zip(pad[::2], pad[1::2], strict=True)
        return {rank - 1 - index: left for index, (left, right) in enumerate(pairs) if left or right}

    def constant(self, op: Instance) -> bool:
        return bool(op.arguments.get("mode", "constant") == "constant")

    def fill(self, op: Instance) -> float:
        return float(op["value"] or 0.0)

    def equation(self, op: Instance) -> Equation:
        labels = tuple(f"d{dim}" for dim in range(len(op.shape())))
        pads = self.pads(op)
        kind = Kind.WINDOWED if self.constant(op) else Kind.WHOLE
        kinds = {labels[dim]: kind for dim in pads}
        windows = (
            {labels[dim]: Window(padding=left) for dim, left in pads.items()} if self.constant(op) else {}
        )
        linear = () if self.constant(op) and self.fill(op) else (frozenset({0}),)
        return Equation((labels,), (labels,), kinds, linear=linear, windows=windows)

    def lower(self, site: Site) -> Sequence[Any]:
        value, pad = site.values[0], list(site["pad"])
        for dim, left in self.pads(site).items():
            if site.axes(f"d{dim}"):
                value = fetch(site, value, dim, f"d{dim}", Window(padding=left), fill=self.fill(site))
                place = 2 * (len(site.shape()) - 1 - dim)
                pad[place : place + 2] = [0, 0]
        if not any(pad):
            return (value,)
        site.values[0] = value
        return (site.local_call(pad=pad),)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 7, 9)
        yield Sample(aten.pad.default, (x, [1, 2, 0, 3]))
        yield Sample(aten.pad.default, (x, [2, -1], "constant", 1.5))
        yield Sample(aten.pad.default, (x, [2, 1], "reflect"))
        yield Sample(aten.constant_pad_nd.default, (x, [0, 0, -2, 3], 0.0))


def _reshaped(_: Sequence[Any], shape: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    return aten.reshape.default, (list(shape),)


def _permuted(target: Any, args: Sequence[Any], shape: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    order = target(torch.empty(tuple(range(len(shape))), device="meta"), *args).shape
    return aten.permute.default, ([order.index(dim) for dim in range(len(shape))],)


for _view in (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int):
    declare(_view, undo=_reshaped)
for _view in (aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
    declare(_view, undo=_reshaped)
for _view in (aten.transpose.int, aten.permute.default, aten.t.default, aten.movedim.int, aten.mT.default):
    declare(_view, undo=partial(_permuted, _view))
declare(aten.view.default, any_strides=aten.reshape.default)
declare(aten.reshape, aten.view, aten.flatten, aten.unflatten, aten.contiguous, copies_expanded=True)
declare(aten.expand, aten.broadcast_to, aten.broadcast_tensors, rows_alike=True)
declare(aten.slice.Tensor, put_back=aten.slice_scatter.default)
declare(aten.select.int, put_back=aten.select_scatter.default)
declare(aten.view, aten.reshape, aten.flatten, aten.squeeze, aten.expand, aten.slice, is_identity=True)
declare(aten.broadcast_tensors, is_identity=True, expands_each=True)
declare(aten.cat, is_identity=True, changes=lambda args: len(args[0]) > 1, skips_empty=True)
declare(aten.constant_pad_nd, only_moves=True)
