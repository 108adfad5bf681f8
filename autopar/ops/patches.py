"""Patches, windows and sampled places of images and signals: each sample has its own, so samples are free.

grid_sampler   "n c h. w., n p q x. -> n c p q"      im2col   "n c. h. w. -> n k. l."
unfold         "n t. -> n w. k."                     stft     "n t. -> n f. t."
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.core.operator_facts import declare
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register

aten = torch.ops.aten


@register
class GridSampler(Rule):
    """Pixels of an image at the places of a grid."""

    targets = (aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)

    def equation(self, op: Instance) -> Equation:
        count = len(op.shape()) - 2
        places = tuple(f"p{dim}" for dim in range(count))
        image = ("n", "c", *(None,) * count)
        return Equation((image, ("n", *places, None)), (("n", "c", *places),), linear=(frozenset({0}),))

    def samples(self) -> Iterable[Sample]:
        for mode, padding, corners in ((0, 0, False), (1, 1, True)):
            yield Sample(
                aten.grid_sampler.default,
                (torch.randn(3, 2, 4, 5), torch.rand(3, 5, 3, 2) * 2 - 1, mode, padding, corners),
            )
        yield Sample(
            aten.grid_sampler.default,
            (torch.randn(3, 2, 4, 5, 3), torch.rand(3, 2, 4, 3, 3) * 2 - 1, 0, 0, True),
        )


@register
class AffineGrid(Rule):
    """The grid of each sample's affine map."""

    targets = (aten.affine_grid_generator.default,)

    def equation(self, op: Instance) -> Equation:
        return Equation((("n", None, None),), (("n", *(None,) * (len(op.result_shape()) - 1)),))

    def lower(self, site: Site) -> Sequence[Handle]:
        samples = site.emitter.shape(site.values[0])[0]
        return (site.local_call(size=[samples, *site["size"][1:]]),)

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.affine_grid_generator.default, (torch.randn(5, 2, 3), [5, 4, 3, 6], False))
        yield Sample(aten.affine_grid_generator.default, (torch.randn(3, 3, 4), [3, 1, 3, 2, 4], True))


@register
class Patches(Rule):
    """Images as columns of patches, and columns put back; without samples nothing is free."""

    targets = (aten.im2col.default, aten.col2im.default)

    def equation(self, op: Instance) -> Equation:
        before, after = len(op.shape()), len(op.result_shape())
        sampled = before == (4 if op.operator.target is aten.im2col.default else 3)
        first = ("n",) if sampled else (None,)
        return Equation(
            ((*first, *(None,) * (before - 1)),),
            ((*first, *(None,) * (after - 1)),),
            linear=(frozenset({0}),),
        )

    def samples(self) -> Iterable[Sample]:
        columns = torch.randn(3, 12, 16)
        yield Sample(aten.im2col.default, (torch.randn(5, 2, 4, 6), [3, 2], [1, 1], [1, 0], [1, 2]))
        yield Sample(aten.im2col.default, (torch.randn(2, 4, 6), [3, 2], [1, 1], [1, 0], [1, 2]))
        yield Sample(aten.col2im.default, (columns, [5, 6], [2, 3], [1, 1], [0, 0], [1, 1]))
        yield Sample(aten.col2im.default, (columns[0], [5, 6], [2, 3], [1, 1], [0, 0], [1, 1]))


@register
class Unfold(Rule):
    """Windows of one dim, laid along a new last dim."""

    targets = (aten.unfold.default,)

    def equation(self, op: Instance) -> Equation:
        along = op.dim(op["dimension"])
        kept = tuple(None if dim == along else f"d{dim}" for dim in range(len(op.shape())))
        return Equation((kept,), ((*kept, None),), linear=(frozenset({0}),))

    def samples(self) -> Iterable[Sample]:
        yield Sample(aten.unfold.default, (torch.randn(3, 8, 5), 1, 4, 2))
        yield Sample(aten.unfold.default, (torch.randn(5, 7), -1, 3, 3))


@register
class Unpool(Rule):
    """Max pooling's values put back where they came from; indices count within a sample's and channel's
    plane."""

    targets = (aten.max_unpool2d.default, aten.max_unpool3d.default)

    def equation(self, op: Instance) -> Equation:
        count = 2 if op.operator.target is aten.max_unpool2d.default else 3
        lead = ("n", "c")[-(len(op.shape()) - count) :]
        labels = (*lead, *(None,) * count)
        return Equation((labels, labels), (labels,), linear=(frozenset({0}),))

    def samples(self) -> Iterable[Sample]:
        picked, places = torch.nn.functional.max_pool2d(torch.randn(3, 2, 4, 6), 2, return_indices=True)
        yield Sample(aten.max_unpool2d.default, (picked, places, [4, 6]))
        yield Sample(aten.max_unpool2d.default, (picked[0], places[0], [4, 6]))


@register
class ShortTimeFourier(Rule):
    """Spectra of windows of each signal, under one window."""

    targets = (aten.stft.default, aten.stft.center, aten.istft.default)

    def equation(self, op: Instance) -> Equation:
        before, after = len(op.shape()), len(op.result_shape())
        core = 1 if op.operator.target is not aten.istft.default else 2
        first = ("n",) if before == core + 1 else (None,)
        others = tuple((None,) * len(op.shape(index)) for index in range(1, len(op.operands)))
        return Equation(
            ((*first, *(None,) * (before - 1)), *others),
            ((*first, *(None,) * (after - 1)),),
            {} if first == (None,) else {"n": Kind.FREE},
        )

    def samples(self) -> Iterable[Sample]:
        x, window = torch.randn(3, 20), torch.hann_window(8, dtype=torch.float64)
        yield Sample(aten.stft.default, (x, 8, 4, 8, window), {"return_complex": True}, ("operand_1",))
        yield Sample(
            aten.stft.center,
            (x, 8, 4, 8, window, True, "reflect", False, True, True),
            constant=("operand_1",),
        )


declare(aten.affine_grid_generator, casts_inside=True)
