"""Maximum and average pooling, sliding and adaptive, in one to three spatial dims.

    max_pool2d            "n c h~ w~ -> n c h~ w~"      avg_pool2d likewise
    adaptive_avg_pool2d   "n c h+ w+ -> n c _ _"        to size 1: a mean, whose shares are summed

What lies outside the image arrives as the operator's own padding, -inf or 0, so that the local
call pads nothing on a sharded dim and a last window cut short by `ceil_mode` is a full one.

An average keeps the serial divisor. The local call divides by the full window; the serial count is
a product over dims, so only the rows at the border are corrected, by count / kernel of each dim:

    kernel 3, stride 2, padding 1, 6 rows          outputs     0      1      2
                                                   inputs    -1..1   1..3   3..5
                              count, padding left out          2      3      3
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from autopar.sharding.equation import Equation, Kind, Labels
from autopar.sharding.halo import fetch, result_rows
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.window import Window, per_dim
from autopar.torch_seams.schemas import schema_of

aten = torch.ops.aten
_SPACE = "dhw"


class _Pooling(Rule):
    """Rules for all pooling: n and c free, each spatial dim with a window or whole."""

    fill = 0.0
    linear: tuple[frozenset[int], ...] = ()

    def space(self, op: Instance) -> str:
        name = schema_of(op.operator.target).name  # aten::max_pool2d_with_indices
        return _SPACE[-int(name[name.index("d", name.index("pool")) - 1]) :]

    def first(self, op: Instance) -> int:
        """The first spatial dim."""
        return len(op.shape()) - len(self.space(op))

    def windows(self, op: Instance) -> dict[str, Window]:
        count = len(self.space(op))
        kernel = per_dim(op["kernel_size"], count)
        stride = per_dim(op["stride"] or kernel, count)
        dilation = per_dim(op.arguments.get("dilation", 1), count)
        sizes = zip(kernel, stride, per_dim(op["padding"], count), dilation, strict=True)
        return {name: Window(*each) for name, each in zip(self.space(op), sizes, strict=True)}

    def equation(self, op: Instance) -> Equation:
        labels = self.labels(op)
        windows = self.windows(op)
        kinds = {name: Kind.WINDOWED if name in windows else Kind.WHOLE for name in self.space(op)}
        return Equation((labels,), (labels,) * op.num_results, kinds, linear=self.linear, windows=windows)

    def labels(self, op: Instance) -> Labels:
        return (*("n", "c")[-self.first(op) :], *self.space(op))

    def sharded(self, site: Site) -> dict[str, int]:
        """The windowed factors that are sharded, each with its dim."""
        windows = self.equation(site).windows
        pairs = enumerate(self.space(site), start=self.first(site))
        return {name: dim for dim, name in pairs if name in windows and site.axes(name)}

    def fetch_windows(self, site: Site) -> None:
        """Replace the operand by the rows that the rank's windows cover."""
        windows = self.windows(site)
        for name, dim in self.sharded(site).items():
            site.values[0] = fetch(site, site.values[0], dim, name, windows[name], fill=self.fill)

    def local_padding(self, site: Site) -> list[int]:
        sharded = self.sharded(site)
        padding = per_dim(site["padding"], len(self.space(site)))
        return [0 if name in sharded else pad for name, pad in zip(self.space(site), padding, strict=True)]

    def global_indices(self, site: Site, indices: Handle) -> Handle:
        """Flat indices of the fetched plane as flat indices of the whole one.

        A plane of width v whose first row is r and first column is q, out of a whole one of width w:
        i -> (i // v + r) * w + i % v + q.
        """
        windows, first, space = self.windows(site), self.first(site), self.space(site)
        here, whole = site.emitter.shape(site.values[0])[first:], site.shape()[first:]
        origin = [0] * len(space)
        for name, dim in self.sharded(site).items():
            origin[dim - first] = windows[name].needs(*result_rows(site, dim))[0]
        inner, outer = 1, 1
        total = None
        for size, extent, start in reversed(list(zip(here, whole, origin, strict=True))):
            row = site.call(aten.floor_divide.default, indices, inner)
            row = site.call(aten.remainder.Scalar, row, size)
            row = site.call(aten.mul.Scalar, site.call(aten.add.Scalar, row, start), outer)
            total = row if total is None else site.call(aten.add.Tensor, total, row)
            inner, outer = inner * size, outer * extent
        return total


@register
class MaxPool(_Pooling):
    """The largest element of each window, and where it lies in the plane if that is asked for."""

    targets = (
        aten.max_pool1d.default,
        aten.max_pool2d.default,
        aten.max_pool3d.default,
        aten.max_pool1d_with_indices.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
    )
    fill = -math.inf

    def lower(self, site: Site) -> Sequence[Handle]:
        if not self.sharded(site):
            return super().lower(site)
        self.fetch_windows(site)
        result = site.local_call(padding=self.local_padding(site))
        if site.num_results == 1:
            return (result,)
        return result[0], self.global_indices(site, result[1])

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 2, 9, 11)
        yield Sample(aten.max_pool2d.default, (x, [2, 2]))
        yield Sample(aten.max_pool2d.default, (x, [3, 3], [2, 2], [1, 1]))
        yield Sample(aten.max_pool2d.default, (x, [3], [2], [0], [1], True))
        yield Sample(aten.max_pool2d.default, (x, [2, 3], [3, 1], [1, 1], [2, 2], True))
        yield Sample(aten.max_pool2d.default, (x[0], [3, 3], [2, 2], [1, 1]))
        yield Sample(aten.max_pool2d_with_indices.default, (x, [3, 2], [2, 2], [1, 0], [1, 1], True))
        yield Sample(aten.max_pool1d_with_indices.default, (torch.randn(2, 3, 13), [3], [2], [1]))
        yield Sample(aten.max_pool1d.default, (torch.randn(2, 3, 13), [3], [2], [1]))
        volume = torch.randn(2, 2, 5, 6, 7)
        yield Sample(aten.max_pool3d.default, (volume, [2, 2, 2]))
        yield Sample(aten.max_pool3d_with_indices.default, (volume, [2, 2, 3], [1, 2, 2], [0, 1, 1]))


@register
class AveragePool(_Pooling):
    """The mean of each window, over the serial divisor."""

    targets = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
    linear = (frozenset({0}),)

    def lower(self, site: Site) -> Sequence[Handle]:
        if not self.sharded(site):
            return super().lower(site)
        self.fetch_windows(site)
        result = site.local_call(padding=self.local_padding(site))
        ratio = self.ratio(site)
        return (result if ratio is None else site.call(aten.div.Tensor, result, ratio),)

    def ratio(self, site: Site) -> Handle | None:
        """Divide count by kernel for every position of the rank's result; None where it is 1 on all ranks."""
        if site.arguments.get("divisor_override"):
            return None
        windows, product = self.windows(site), None
        for name, dim in self.sharded(site).items():
            window, limit = windows[name], self.limits(site, dim, windows[name])
            if all(
                self.count(window, limit, row) == window.kernel for row in range(site.result_shape()[dim])
            ):
                continue
            counts = self.counts(site, dim, window)
            product = counts if product is None else site.call(aten.mul.Tensor, product, counts)
        return product

    def limits(self, site: Site, dim: int, window: Window) -> tuple[int, int]:
        """Rows [low, high) that count towards a divisor."""
        around = window.padding if site["count_include_pad"] else 0
        return -around, site.shape()[dim] + around

    def count(self, window: Window, limits: tuple[int, int], row: int) -> int:
        low, high = window.needs(row, row + 1)
        return min(high, limits[1]) - max(low, limits[0])

    def counts(self, site: Site, dim: int, window: Window) -> Handle:
        """`count` of the rank's rows over the kernel, shaped to broadcast along `dim`."""
        low, high = self.limits(site, dim, window)
        rows = site.call(aten.arange.start, *result_rows(site, dim), device=torch.device("cpu"))
        begin = site.call(aten.sub.Scalar, site.call(aten.mul.Scalar, rows, window.stride), window.padding)
        end = site.call(aten.clamp_max.default, site.call(aten.add.Scalar, begin, window.kernel), high)
        count = site.call(aten.sub.Tensor, end, site.call(aten.clamp_min.default, begin, low))
        exact = site.call(aten.to.dtype, count, site.spec().dtype)
        shape = [-1] + [1] * (len(site.shape()) - dim - 1)
        return site.call(aten.div.Scalar, site.call(aten.reshape.default, exact, shape), window.kernel)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 2, 9, 11)
        yield Sample(aten.avg_pool2d.default, (x, [2, 2]))
        yield Sample(aten.avg_pool2d.default, (x, [3, 3], [2, 2], [1, 1]))
        yield Sample(aten.avg_pool2d.default, (x, [3, 3], [2, 2], [1, 1], False, False))
        for ceil, include, divisor in itertools.product((True, False), (True, False), (None, 5)):
            yield Sample(aten.avg_pool2d.default, (x, [4, 3], [3, 2], [2, 0], ceil, include, divisor))
        yield Sample(aten.avg_pool1d.default, (torch.randn(2, 3, 14), [4], [3], [1], True))
        yield Sample(aten.avg_pool1d.default, (torch.randn(3, 13), [3], [2], [1], False, False))
        yield Sample(aten.avg_pool3d.default, (torch.randn(2, 2, 5, 6, 7), [3, 2, 2], [2, 2, 1], [1, 0, 1]))


class _Adaptive(_Pooling):
    """Pooling to a given size: where that divides the image evenly, windows that don't overlap."""

    def sizes(self, op: Instance) -> dict[str, tuple[int, int]]:
        """(input, output) rows of each spatial dim."""
        first = self.first(op)
        return dict(
            zip(self.space(op), zip(op.shape()[first:], op.result_shape()[first:], strict=True), strict=True)
        )

    def windows(self, op: Instance) -> dict[str, Window]:
        return {
            name: Window(before // after, before // after)
            for name, (before, after) in self.sizes(op).items()
            if before % after == 0
        }

    def local_sizes(self, site: Site) -> list[int]:
        return list(site.local_result_shape()[self.first(site) :])


@register
class AdaptiveMaxPool(_Adaptive):
    """The largest element of each of `output_size` windows, and its place in the plane."""

    targets = (
        aten.adaptive_max_pool1d.default,
        aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool3d.default,
    )
    fill = -math.inf

    def lower(self, site: Site) -> Sequence[Handle]:
        if not self.sharded(site):
            return super().lower(site)
        self.fetch_windows(site)
        values, indices = site.local_call(output_size=self.local_sizes(site))
        return values, self.global_indices(site, indices)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 2, 8, 9)
        yield Sample(aten.adaptive_max_pool2d.default, (x, [4, 3]))
        yield Sample(aten.adaptive_max_pool2d.default, (x, [3, 9]))
        yield Sample(aten.adaptive_max_pool2d.default, (x, [1, 1]))
        yield Sample(aten.adaptive_max_pool1d.default, (torch.randn(3, 12), [6]))
        yield Sample(aten.adaptive_max_pool3d.default, (torch.randn(2, 2, 4, 5, 6), [2, 5, 3]))


@register
class AdaptiveAveragePool(_Adaptive):
    """The mean of each of `output_size` windows.

    To size 1 it is a mean over the whole dim: a rank's mean, weighted by its share of the elements,
    is its part of a partial sum.
    """

    targets = (
        aten.adaptive_avg_pool1d.default,
        aten.adaptive_avg_pool2d.default,
        aten.adaptive_avg_pool3d.default,
    )
    linear = (frozenset({0}),)

    def equation(self, op: Instance) -> Equation:
        labels = self.labels(op)
        means = {name for name, (_, after) in self.sizes(op).items() if after == 1}
        windows = {name: window for name, window in self.windows(op).items() if name not in means}
        kinds = dict.fromkeys(self.space(op), Kind.WHOLE) | dict.fromkeys(windows, Kind.WINDOWED)
        kinds |= dict.fromkeys(means, Kind.CONTRACTED)
        result = tuple(None if label in means else label for label in labels)
        return Equation((labels,), (result,), kinds, linear=self.linear, windows=windows)

    def lower(self, site: Site) -> Sequence[Handle]:
        self.fetch_windows(site)
        result = site.local_call(output_size=self.local_sizes(site))
        share = self.share(site, self.equation(site).kinds)
        return (result if share == 1 else site.call(aten.mul.Scalar, result, share),)

    def share(self, site: Site, kinds: Mapping[str, Kind]) -> float:
        """The rank's part of the elements that each mean is taken over."""
        before, after = site.shape(), site.emitter.shape(site.values[0])
        means = [
            dim for dim, name in enumerate(self.labels(site)) if name and kinds.get(name) is Kind.CONTRACTED
        ]
        return math.prod(after[dim] for dim in means) / math.prod(before[dim] for dim in means)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 2, 8, 9)
        yield Sample(aten.adaptive_avg_pool2d.default, (x, [1, 1]))
        yield Sample(aten.adaptive_avg_pool2d.default, (x, [4, 1]))
        yield Sample(aten.adaptive_avg_pool2d.default, (x, [3, 9]))
        yield Sample(aten.adaptive_avg_pool2d.default, (x[0], [2, 3]))
        yield Sample(aten.adaptive_avg_pool1d.default, (torch.randn(3, 4, 13), [1]))
        yield Sample(aten.adaptive_avg_pool1d.default, (torch.randn(4, 13), [5]))
        yield Sample(aten.adaptive_avg_pool3d.default, (torch.randn(2, 2, 4, 5, 6), [1, 1, 1]))
