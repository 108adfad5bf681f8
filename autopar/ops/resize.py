"""Images resized by interpolation: nearest, linear and cubic, in one to three spatial dims.

    upsample_bilinear2d   "n c h~ w~ -> n c h~ w~"

A spatial dim is windowed where one size divides the other. A rank fetches the rows that its own
result rows read, resizes them, and cuts off what the rows at the edge gave too much. Only rows
inside the image are fetched, so the local call repeats the first and the last row of the image
where the serial one does, and nowhere else.

    linear, factor 2       result rows     0     1      2      3
                           image rows      0   0..1   0..1   1..2

Linear interpolation by any other ratio is written out: both neighbours of each result row are
picked by their global places and weighed. Nearest and cubic keep such a dim whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from autopar.sharding.equation import Equation, Kind
from autopar.sharding.halo import fetch, result_rows
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.window import RowMap, Window

aten = torch.ops.aten
_SPACE = "dhw"

# Torch finds a nearest row as floor(o * (1 / factor)) in float32; from 41 on the product may fall
# short of a whole number, and rows are no longer those of an exact division.
MOST_EXACT_FACTOR = 40


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Result row o lies at (o + 1/2) / factor - 1/2 and reads `reach` rows around that.

    Source: area_pixel_compute_source_index of PyTorch's UpSample.h, align_corners false.
    """

    factor: int
    length: int  # rows of the image
    reach: int

    @property
    def scale(self) -> Fraction:
        return Fraction(self.factor)

    def needs(self, start: int, stop: int) -> tuple[int, int]:
        return max(0, self._floor(start) - self.reach + 1), min(
            self.length, self._floor(stop - 1) + self.reach + 1
        )

    def _floor(self, row: int) -> int:
        return (2 * row + 1 - self.factor) // (2 * self.factor)


@dataclass(frozen=True, slots=True)
class Lerp:
    """Result row o lies at place(o) and reads the rows on both sides of that. place(o) = o step, or (o +
    1/2) step - 1/2 if corners are not aligned.

    Source: compute_source_index_and_lambda of PyTorch's UpSample.h.
    """

    before: int
    after: int
    step: float
    align_corners: bool

    @property
    def scale(self) -> Fraction:
        return Fraction(self.after, self.before)

    def needs(self, start: int, stop: int) -> tuple[int, int]:
        return self._floor(start), min(self.before, self._floor(stop - 1) + 2)

    def _floor(self, row: int) -> int:
        place = row * self.step if self.align_corners else (row + 0.5) * self.step - 0.5
        return min(int(max(place, 0.0)), self.before - 1)


class _Resize(Rule):
    """n and c free, each spatial dim windowed if the sizes' ratio or its inverse is whole."""

    def space(self, op: Instance) -> str:
        return _SPACE[-(len(op.shape()) - 2) :]

    def scales(self, op: Instance) -> list[float | None]:
        """The scale of each spatial dim that the caller gave, None where only the size counts."""
        space = self.space(op)
        if "scale_factors" in op.arguments:
            return list(op["scale_factors"] or [None] * len(space))
        if len(space) == 1:
            return [op["scales"]]
        return [op[f"scales_{name}"] for name in space]

    def windows(self, op: Instance) -> dict[str, RowMap]:
        sizes = zip(self.space(op), op.shape()[2:], op.result_shape()[2:], self.scales(op), strict=True)
        found = {}
        for name, before, after, scale in sizes:
            window = self.window(op, before, after) if scale in (None, after / before) else None
            window = window or self.uneven(op, before, after, scale)
            if window is not None:
                found[name] = window
        return found

    def window(self, op: Instance, before: int, after: int) -> RowMap | None:
        """Map from the `after` rows to the `before` rows that they read; None if they need the whole dim."""
        if op.arguments.get("align_corners"):
            return Window() if before == after else None
        if after % before == 0:
            return self.enlarging(after // before, before)
        if before % after == 0:
            return self.shrinking(before // after)
        return None

    def enlarging(self, factor: int, length: int) -> RowMap | None:
        """Nearest: row i fills a block of rows, as in a transposed convolution."""
        return Window(factor, factor, transposed=True) if factor <= MOST_EXACT_FACTOR else None

    def shrinking(self, factor: int) -> RowMap | None:
        """Nearest and linear: what a result row reads lies within its own block of rows."""
        return Window(factor, factor)

    def uneven(self, op: Instance, before: int, after: int, scale: float | None) -> RowMap | None:
        """The rows that are read where neither size divides the other."""
        return None

    def equation(self, op: Instance) -> Equation:
        windows = self.windows(op)
        labels = ("n", "c", *self.space(op))
        kinds = {name: Kind.WINDOWED if name in windows else Kind.WHOLE for name in self.space(op)}
        return Equation((labels,), (labels,), kinds, linear=(frozenset({0}),), windows=windows)

    def lower(self, site: Site) -> Sequence[Handle]:
        windows, scales = self.windows(site), self.scales(site)
        value, sizes, crops = site.values[0], list(site.result_shape()[2:]), []
        for index, name in enumerate(self.space(site)):
            if not site.axes(name):
                continue
            dim, window = index + 2, windows[name]
            value = fetch(site, value, dim, name, window)
            start, stop = result_rows(site, dim)
            if isinstance(window, Lerp):
                value, sizes[index], scales[index] = _lerp(site, value, dim, window), stop - start, None
                continue
            first = int(window.needs(start, stop)[0] * window.scale)
            sizes[index], scales[index] = int(site.emitter.shape(value)[dim] * window.scale), None
            crops.append((dim, start - first, stop - first))
        align = [site["align_corners"]] if "align_corners" in site.arguments else []
        result = site.call(site.operator.target.overloadpacket.default, value, sizes, *align, *scales)
        for dim, start, stop in crops:
            result = site.call(aten.slice.Tensor, result, dim, start, stop)
        return (result,)


def _lerp(site: Site, value: Handle, dim: int, window: Lerp) -> Handle:
    """The rank's result rows along `dim`, from the fetched rows that `window` needs.

    Places are computed in float64: `needs` has to find the same rows.
    """
    start, stop = result_rows(site, dim)
    first, last = window.needs(start, stop)[0], window.before - 1
    rows = site.call(aten.arange.start, start, stop, dtype=torch.float64, device=torch.device("cpu"))
    shift = 0.0 if window.align_corners else 0.5
    place = site.call(aten.mul.Scalar, site.call(aten.add.Scalar, rows, shift), window.step)
    place = site.call(aten.clamp.default, site.call(aten.sub.Scalar, place, shift), 0, last)
    lower = site.call(aten.floor.default, place)
    upper = site.call(aten.clamp_max.default, site.call(aten.add.Scalar, lower, 1), last)
    weight = site.call(aten.to.dtype, site.call(aten.sub.Tensor, place, lower), site.spec().dtype)
    ends = []
    for neighbour in (lower, upper):
        index = site.call(aten.to.dtype, site.call(aten.sub.Scalar, neighbour, first), torch.int64)
        ends.append(site.call(aten.index_select.default, value, dim, index))
    weight = site.call(aten.reshape.default, weight, [-1] + [1] * (len(site.shape()) - dim - 1))
    return site.call(aten.lerp.Tensor, *ends, weight)


@register
class Nearest(_Resize):
    """The nearest row, by either of PyTorch's two roundings."""

    targets = (
        aten.upsample_nearest1d.vec,
        aten.upsample_nearest2d.vec,
        aten.upsample_nearest3d.vec,
        aten.upsample_nearest1d.default,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest3d.default,
        aten._upsample_nearest_exact1d.vec,
        aten._upsample_nearest_exact2d.vec,
        aten._upsample_nearest_exact3d.vec,
    )

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(2, 3, 6, 5)
        yield Sample(aten.upsample_nearest2d.vec, (x, None, [2.0, 3.0]))
        yield Sample(aten.upsample_nearest2d.vec, (x, [3, 7], None))
        yield Sample(aten.upsample_nearest2d.vec, (x, None, [1.5, 2.0]))
        yield Sample(aten.upsample_nearest2d.default, (x, [12, 5]))
        yield Sample(aten._upsample_nearest_exact2d.vec, (x, None, [0.5, 2.0]))
        yield Sample(aten.upsample_nearest1d.vec, (torch.randn(2, 3, 7), None, [4.0]))
        yield Sample(aten.upsample_nearest3d.vec, (torch.randn(2, 2, 3, 4, 3), None, [2.0, 2.0, 1.0]))


@register
class LinearResize(_Resize):
    """Linear along each dim."""

    targets = (
        aten.upsample_linear1d.vec,
        aten.upsample_bilinear2d.vec,
        aten.upsample_trilinear3d.vec,
        aten.upsample_linear1d.default,
        aten.upsample_bilinear2d.default,
        aten.upsample_trilinear3d.default,
    )

    def enlarging(self, factor: int, length: int) -> RowMap:
        return Interpolation(factor, length, reach=1)

    def uneven(self, op: Instance, before: int, after: int, scale: float | None) -> RowMap | None:
        if op["align_corners"]:
            step = (before - 1) / (after - 1) if after > 1 else 0.0
        else:
            step = 1 / scale if scale else before / after
        return Lerp(before, after, step, bool(op["align_corners"]))

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(2, 3, 6, 5)
        yield Sample(aten.upsample_bilinear2d.vec, (x, None, False, [2.0, 3.0]))
        yield Sample(aten.upsample_bilinear2d.vec, (x, [3, 20], False, None))
        yield Sample(aten.upsample_bilinear2d.vec, (x, [2, 7], False, None))
        yield Sample(aten.upsample_bilinear2d.vec, (x, [12, 5], True, None))
        yield Sample(aten.upsample_bilinear2d.vec, (x, None, False, [2.0, 1.5]))
        yield Sample(aten.upsample_bilinear2d.vec, (x, [11, 7], True, None))
        yield Sample(aten.upsample_bilinear2d.vec, (x, None, False, [0.7, 1.3]))
        yield Sample(aten.upsample_linear1d.vec, (torch.randn(2, 3, 7), None, False, [2.0]))
        yield Sample(aten.upsample_linear1d.default, (torch.randn(2, 3, 7), [28], False))
        yield Sample(
            aten.upsample_trilinear3d.vec, (torch.randn(2, 2, 3, 4, 3), None, False, [2.0, 2.0, 1.0])
        )


@register
class Cubic(_Resize):
    """Cubic along both dims; shrinking reads beyond a row's own block and keeps the dim whole."""

    targets = (aten.upsample_bicubic2d.vec, aten.upsample_bicubic2d.default)

    def enlarging(self, factor: int, length: int) -> RowMap:
        return Interpolation(factor, length, reach=2)

    def shrinking(self, factor: int) -> RowMap | None:
        return None

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(2, 2, 4, 5)
        yield Sample(aten.upsample_bicubic2d.vec, (x, None, False, [2.0, 3.0]))
