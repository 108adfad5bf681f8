"""Elements moved, repeated or masked by their place in a dim.

Where the move is a product of loops (pixel shuffle, repeat) it is a relation between dims (see
dims.py); otherwise (roll, fftshift, flip, tril) the dims that it runs along stay whole, the others are free.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch

from autopar.core.operator_facts import declare
from autopar.sharding.atoms import Dim, Relation
from autopar.sharding.equation import Equation
from autopar.sharding.rule import Handle, Instance, Regroup, Rule, Sample, Site, register

aten = torch.ops.aten

declare(aten.repeat, aten.tile, aten.repeat_interleave.self_int, rows_alike=True)


def _ends(op: Instance) -> tuple[str, str]:
    result = op.operator.results[0]
    assert result is not None
    return op.operands[0], result


def _alike(before: str, after: str, dims: Iterable[int]) -> list[Relation]:
    return [Relation(((before, dim),), ((after, dim),)) for dim in dims]


class _LocalRegroup(Regroup):
    """A Regroup whose local call has the same arguments as the serial one."""

    def lower(self, site: Site) -> Sequence[Handle]:
        return (site.local_call(),)


@register
class PixelShuffle(_LocalRegroup):
    """Moves channels into pixels: [.., c r r, h, w] -> [.., c, h r, w r]."""

    targets = (aten.pixel_shuffle.default,)

    def relations(self, op: Instance) -> list[Relation]:
        (before, after), factor, last = _ends(op), int(op["upscale_factor"]), len(op.shape()) - 1
        return [
            *_alike(before, after, range(last - 2)),
            Relation(((before, last - 2),), ((after, last - 2), factor, factor)),
            Relation(((before, last - 1), factor), ((after, last - 1),)),
            Relation(((before, last), factor), ((after, last),)),
        ]

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.pixel_shuffle.default, (torch.randn(2, 12, 5, 3), 2))
        yield Sample(aten.pixel_shuffle.default, (torch.randn(9, 4, 3), 3))


@register
class PixelUnshuffle(_LocalRegroup):
    """Moves pixels into channels: [.., c, h r, w r] -> [.., c r r, h, w]."""

    targets = (aten.pixel_unshuffle.default,)

    def relations(self, op: Instance) -> list[Relation]:
        (before, after), factor, last = _ends(op), int(op["downscale_factor"]), len(op.shape()) - 1
        return [
            *_alike(before, after, range(last - 2)),
            Relation(((before, last - 2), factor, factor), ((after, last - 2),)),
            Relation(((before, last - 1),), ((after, last - 1), factor)),
            Relation(((before, last),), ((after, last), factor)),
        ]

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.pixel_unshuffle.default, (torch.randn(2, 3, 10, 6), 2))


@register
class Repeat(_LocalRegroup):
    """Copies of the whole tensor one after the other: a dim of l rows becomes (r, l)."""

    targets = (aten.repeat.default, aten.tile.default)

    def relations(self, op: Instance) -> list[Relation]:
        before, after = _ends(op)
        new = len(op.result_shape()) - len(op.shape())
        return [
            Relation((op.result_shape()[new + dim] // size, (before, dim)), ((after, new + dim),))
            for dim, size in enumerate(op.shape())
        ]

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.repeat.default, (torch.randn(4, 5), [3, 1, 2]))
        yield Sample(aten.tile.default, (torch.randn(4, 6), [2]))


@register
class RepeatInterleave(_LocalRegroup):
    """Each row repeated several times in a row: a dim of l rows becomes (l, r); without a dim, the tensor is
    flattened first."""

    targets = (aten.repeat_interleave.self_int,)

    def relations(self, op: Instance) -> list[Relation]:
        (before, after), repeats = _ends(op), int(op["repeats"])
        dims = range(len(op.shape()))
        if op["dim"] is None:
            return [Relation((*((before, dim) for dim in dims), repeats), ((after, 0),))]
        along = op.dim(op["dim"])
        left: list[tuple[Dim | int, ...]] = [((before, dim), repeats if dim == along else 1) for dim in dims]
        return [Relation(group, ((after, dim),)) for dim, group in enumerate(left)]

    def lower(self, site: Site) -> Sequence[Handle]:
        return (site.local_call(output_size=None),)

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.repeat_interleave.self_int, (torch.randn(4, 5), 3, 1))
        yield Sample(aten.repeat_interleave.self_int, (torch.randn(4, 5), 2))


class _Along(Rule):
    """Some dims whole, the others free; linear in its operand."""

    @abstractmethod
    def whole(self, op: Instance) -> set[int]:
        """The dims along which elements change their places."""

    def equation(self, op: Instance) -> Equation:
        whole = self.whole(op)
        labels = tuple(None if dim in whole else f"d{dim}" for dim in range(len(op.shape())))
        return Equation((labels,), (labels,), linear=(frozenset({0}),))


@register
class Roll(_Along):
    """Elements shifted round along some dims, or along all of them as one."""

    targets = (aten.roll.default, aten.flip.default)

    def whole(self, op: Instance) -> set[int]:
        dims = {op.dim(dim) for dim in op["dims"]}
        return dims or (set(range(len(op.shape()))) if op.operator.target is aten.roll.default else set())

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 4, 6)
        yield Sample(aten.roll.default, (x, [1, -2], [0, -1]))
        yield Sample(aten.roll.default, (x, [3]))
        yield Sample(aten.flip.default, (x, [1]))


@register
class SpectrumShift(_Along):
    """Halves of some dims, or of all, change places: frequency 0 comes to the middle, or to the front."""

    targets = (aten.fft_fftshift.default, aten.fft_ifftshift.default)

    def whole(self, op: Instance) -> set[int]:
        dims = op["dim"]
        return set(range(len(op.shape()))) if dims is None else {op.dim(dim) for dim in dims}

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 4, 7)
        yield Sample(aten.fft_fftshift.default, (x, [1, -1]))
        yield Sample(aten.fft_ifftshift.default, (x, [2]))
        yield Sample(aten.fft_ifftshift.default, (x,))


@register
class ChannelShuffle(_Along):
    """[n, g k, ...] -> [n, k g, ...]: two loops of one dim change places."""

    targets = (aten.channel_shuffle.default,)

    def whole(self, op: Instance) -> set[int]:
        return {1}

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.channel_shuffle.default, (torch.randn(5, 6, 4, 3), 2))


@register
class Triangle(_Along):
    """The lower or upper triangle of the last two dims."""

    targets = (aten.tril.default, aten.triu.default)

    def whole(self, op: Instance) -> set[int]:
        last = len(op.shape()) - 1
        return {last - 1, last}

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.tril.default, (torch.randn(4, 5, 6), 1))
        yield Sample(aten.triu.default, (torch.randn(4, 5, 6), -1))


@register
class SliceScatter(Rule):
    """A tensor with other rows at some places of one dim, as a write to a slice leaves it; linear in both."""

    targets = (aten.slice_scatter.default, aten.select_scatter.default)

    def equation(self, op: Instance) -> Equation:
        along = op.dim(op["dim"])
        labels = tuple(None if dim == along else f"d{dim}" for dim in range(len(op.shape())))
        one = op.operator.target is aten.select_scatter.default
        rows = (*labels[:along], *labels[along + 1 :]) if one else labels
        return Equation((labels, rows), (labels,), linear=(frozenset({0, 1}),))

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 4, 6)
        yield Sample(aten.slice_scatter.default, (x, torch.randn(5, 2, 6), 1, 1, 3))
        yield Sample(aten.slice_scatter.default, (x, torch.randn(3, 4, 6), 0, 0, 5, 2))
        yield Sample(aten.select_scatter.default, (x, torch.randn(5, 4), -1, 2))
