"""Convolutions and transposed convolutions in one to three spatial dims.

    conv2d            "n c+ h~ w~, o c+ r. s., o& -> n o h~ w~"
    conv_transpose2d  "n c+ h~ w~, c+ o r. s., o& -> n o h~ w~"

Sharding h or w is domain parallelism. Where every rank's own rows, padded as the whole image is, give
its outputs but for what the neighbours' rows add ('same' convolutions, and strided ones and their
transposes on aligned cuts), only those rows travel: `autopar.runtime.convolution`. Else the rank
fetches the rows that its outputs need beside its own, what lies outside the image arrives as zeros,
and the local call has no padding on that dim.
With groups, the group is the factor: channels and filters are cut between groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from autopar.core.operator_facts import declare
from autopar.core.work import Flops, MatrixProduct, Multiplication, SizedCall
from autopar.sharding.atoms import Relation
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.halo import Need, fetch, needed, place_along
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.window import Window, per_dim

aten = torch.ops.aten
_SPACE = "dhw"


class _AnyConvolution(Rule):
    """Rules for both directions of convolution; `transposed` is the only difference in the equation."""

    transposed = False

    def space(self, op: Instance) -> str:
        return _SPACE[-(len(op.shape(1)) - 2) :]

    def batched(self, op: Instance) -> bool:
        return len(op.shape(0)) == len(op.shape(1))

    def padding(self, op: Instance) -> list[int] | None:
        """Zeros on both sides of each spatial dim; None if they are not symmetric."""
        padding = op["padding"]
        if padding == "valid":
            return [0] * len(self.space(op))
        if padding == "same":
            dilation = per_dim(op["dilation"], len(self.space(op)))
            reach = [d * (k - 1) for d, k in zip(dilation, op.shape(1)[2:], strict=True)]
            return None if any(item % 2 for item in reach) else [item // 2 for item in reach]
        return per_dim(padding, len(self.space(op)))

    def windows(self, op: Instance) -> dict[str, Window]:
        space, padding = self.space(op), self.padding(op)
        if padding is None:
            return {}
        count = len(space)
        stride, dilation = per_dim(op["stride"], count), per_dim(op["dilation"], count)
        sizes = zip(op.shape(1)[2:], stride, padding, dilation, strict=True)
        return {name: Window(*each, self.transposed) for name, each in zip(space, sizes, strict=True)}

    def equation(self, op: Instance) -> Equation:
        space, windows = self.space(op), self.windows(op)
        grouped = int(op["groups"]) > 1
        channel, filter_ = ("g", "g") if grouped else ("c", "o")
        kernel = tuple(f"k{name}" for name in space)
        first, second = (channel, filter_) if self.transposed else (filter_, channel)
        weight = (first, None if grouped else second, *kernel)
        lead = ("n",) if self.batched(op) else ()
        operands: list[tuple[str | None, ...]] = [(*lead, channel, *space), weight]
        if op.has("bias"):
            operands.append((filter_,))
        kinds = {name: Kind.WINDOWED if name in windows else Kind.WHOLE for name in space}
        kinds |= dict.fromkeys(kernel, Kind.WHOLE) | {"c": Kind.CONTRACTED}
        additive = frozenset({2}) if op.has("bias") else frozenset()
        return Equation(tuple(operands), ((*lead, filter_, *space),), kinds, additive, windows=windows)

    def relations(self, op: Instance) -> list[Relation]:
        groups = int(op["groups"])
        if groups == 1:
            return super().relations(op)
        at = len(op.shape(0)) - len(self.space(op)) - 1
        channels = op.shape(0)[at] // groups
        result = op.operator.results[0]
        assert result is not None
        filters = op.result_shape()[at] // groups
        whole = (op.operands[0], at)
        # Groups are one loop although a group has more filters than channels: scale both sides.
        found = [
            Relation((whole,), (groups, channels)),
            Relation(((result, at),), (groups, filters)),
            Relation((whole, filters), ((result, at), channels)),
        ]
        inner = channels if self.transposed else filters
        found.append(Relation(((op.operands[1], 0),), (groups, inner)))
        found.append(Relation((whole, inner), ((op.operands[1], 0), channels)))
        if op.has("bias"):
            found.append(Relation(((op.operands[2], 0),), ((result, at),)))
        if self.batched(op):
            found.append(Relation(((op.operands[0], 0),), ((result, 0),)))
        return found

    def depth_of(self, op: Instance, equation: Equation, factor: str, atoms: Any) -> int:
        if factor == "g":
            at = len(op.shape(0)) - len(self.space(op)) - 1
            outer = {atoms.of[op.operands[0]][at][0], atoms.of[op.operands[1]][0][0]}
            return 1 if outer == {int(op["groups"])} else 0
        return super().depth_of(op, equation, factor, atoms)

    def local_groups(self, site: Site) -> int:
        axes = site.axes("g")
        if not axes:
            return int(site["groups"])
        per_group = site.shape(0)[-len(self.space(site)) - 1] // int(site["groups"])
        return site.emitter.shape(site.values[0])[-len(self.space(site)) - 1] // per_group

    @abstractmethod
    def output_padding(self, site: Site) -> list[int]:
        """Rows past the end of each spatial dim of a transpose."""

    @abstractmethod
    def local(self, site: Site, value: Handle, how: Sequence[Any]) -> Handle:
        """The call without communication; `how` as in `aten.convolution`, after the bias."""

    def lower(self, site: Site) -> Sequence[Any]:
        padding = self.padding(site)
        if padding is None:
            return (site.local_call(groups=self.local_groups(site)),)
        extra, windows, value = self.output_padding(site), self.windows(site), site.values[0]
        shape, crops = list(site.local_result_shape()), []
        split: tuple[int, str, Need] | None = None
        for index, name in enumerate(self.space(site)):
            if not site.axes(name):
                continue
            dim = len(site.shape(0)) - len(padding) + index
            need, mine = needed(site, dim, name, windows[name]), place_along(site, name)
            extras = _extras(windows[name], need)
            if extras is not None and not any(need.before + need.after):
                extra[index] = extras[mine]
            elif extras is not None and need.from_neighbours and self.batched(site) and split is None:
                split, extra[index] = (dim, name, need), extras[mine]
            else:
                value = fetch(site, value, dim, name, windows[name])
                unpadded = replace(windows[name], padding=0)
                padding[index] = extra[index] = 0
                if self.transposed:
                    first = need.starts[mine] * unpadded.stride - windows[name].padding
                    crops.append((dim, need.made[mine] - first, need.made[mine + 1] - first))
                    shape[dim] = unpadded.length(site.emitter.shape(value)[dim])
        stride, dilation = (per_dim(site[name], len(padding)) for name in ("stride", "dilation"))
        how = (stride, padding, dilation, self.transposed, extra, self.local_groups(site))
        result = self.local(site, value, how) if split is None else _split(site, value, split, how, shape)
        for dim, start, stop in crops:
            result = site.call(aten.slice.Tensor, result, dim, start, stop)
        return (result,)


def _operands(site: Site) -> tuple[Handle, Handle, Handle | None]:
    return site.values[0], site.values[1], site.values[2] if site.has("bias") else None


def _extras(window: Window, need: Need) -> list[int] | None:
    """The output padding with which each rank's own rows give its outputs but for what other rows add;
    None if some rank's do not."""
    narrow, wide = (need.owned, need.made) if window.transposed else (need.made, need.owned)
    if any(first * window.stride != start for first, start in zip(narrow[:-1], wide[:-1], strict=True)):
        return None
    rows, outputs = ([stop - first for first, stop in pairwise(cut)] for cut in (need.owned, need.made))
    extras = [stop - window.length(own) for own, stop in zip(rows, outputs, strict=True)]
    largest = max(window.stride, window.dilation) - 1 if window.transposed else 0
    return extras if all(0 <= each <= largest for each in extras) and min(rows) and min(outputs) else None


def _split(
    site: Site, value: Handle, split: tuple[int, str, Need], how: Sequence[Any], shape: Sequence[int]
) -> Handle:
    """The call to which neighbours add along one dim."""
    dim, name, need = split
    _, weight, bias = _operands(site)
    cut = (site.key(site.axes(name)), need.owned, need.starts, need.stops)
    args = [value, weight, bias, *cut, dim, *how]
    return site.emitter.collective(torch.ops.autopar.convolution.default, args, shape)


@register
class Convolution(_AnyConvolution):
    """Cross-correlation with stride, padding, dilation and groups."""

    targets = (
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.conv1d.padding,
        aten.conv2d.padding,
        aten.conv3d.padding,
    )

    def output_padding(self, site: Site) -> list[int]:
        return [0] * len(self.space(site))

    def local(self, site: Site, value: Handle, how: Sequence[Any]) -> Handle:
        stride, padding, dilation, _, _, groups = how
        _, weight, bias = _operands(site)
        target = getattr(aten, f"conv{len(self.space(site))}d").default
        return site.call(target, value, weight, bias, stride, padding, dilation, groups)

    def samples(self) -> Iterable[Sample]:
        x, w = torch.randn(3, 4, 9, 11), torch.randn(6, 4, 3, 3)
        yield Sample(aten.conv2d.default, (x, w, torch.randn(6), [1, 1], [1, 1]))
        yield Sample(aten.conv2d.default, (x, w, None, [2, 3], [1, 0]))
        yield Sample(aten.conv2d.default, (x, w, None, [2, 2], [2, 2], [2, 2]))
        yield Sample(aten.conv2d.default, (x, torch.randn(4, 4, 2, 5), None, [1, 2], [0, 3]))
        yield Sample(
            aten.conv2d.default, (x, torch.randn(8, 1, 3, 3), torch.randn(8), [1, 1], [1, 1], [1, 1], 4)
        )
        yield Sample(aten.conv2d.default, (x, torch.randn(6, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 2))
        yield Sample(aten.conv2d.padding, (x, w, None, [1, 1], "same"))
        yield Sample(aten.conv2d.padding, (x, torch.randn(6, 4, 2, 2), None, [1, 1], "same"))
        yield Sample(
            aten.conv1d.default, (torch.randn(3, 4, 13), torch.randn(5, 4, 5), torch.randn(5), [3], [2])
        )
        yield Sample(
            aten.conv3d.default,
            (torch.randn(2, 3, 6, 5, 7), torch.randn(4, 3, 3, 3, 3), None, [1, 1, 1], [1, 1, 1]),
        )
        yield Sample(aten.conv2d.default, (torch.randn(4, 9, 11), w, torch.randn(6), [1, 1], [1, 1]))


@register
class TransposedConvolution(_AnyConvolution):
    """The transpose of a convolution: each input row adds to a window of output rows."""

    targets = (
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
    )
    transposed = True

    def output_padding(self, site: Site) -> list[int]:
        return per_dim(site["output_padding"], len(self.space(site)))

    def local(self, site: Site, value: Handle, how: Sequence[Any]) -> Handle:
        stride, padding, dilation, _, extra, groups = how
        _, weight, bias = _operands(site)
        return site.call(site.operator.target, value, weight, bias, stride, padding, extra, groups, dilation)

    def samples(self) -> Iterable[Sample]:
        x, w = torch.randn(3, 4, 7, 5), torch.randn(4, 6, 3, 3)
        target = aten.conv_transpose2d.input
        yield Sample(target, (x, w, torch.randn(6), [2, 2], [1, 1], [1, 1]))
        yield Sample(target, (x, torch.randn(4, 6, 2, 2), None, [2, 2]))
        yield Sample(target, (x, torch.randn(4, 5, 2, 1), torch.randn(5), [3, 3], [0, 0], [2, 1]))
        yield Sample(target, (x, w, None, [1, 2], [1, 0], [0, 0], 1, [2, 1]))
        yield Sample(target, (x, torch.randn(4, 3, 3, 3), torch.randn(6), [2, 2], [1, 1], [0, 0], 2))
        yield Sample(
            aten.conv_transpose1d.default, (torch.randn(2, 3, 8), torch.randn(3, 4, 4), None, [2], [1])
        )
        yield Sample(
            aten.conv_transpose3d.input,
            (torch.randn(2, 3, 4, 5, 3), torch.randn(3, 2, 2, 2, 2), None, [2, 2, 2]),
        )


# A convolution of o filters has |w|/o multiply-adds for an output, a transposed one of i channels |w|/i for
# an input. As a matrix product: m = samples x positions, n = filters of a group, k = what a filter sums.


def _flops(call: SizedCall) -> Flops:
    x, w = call.operands[:2]
    return Flops.of_product(2 * call.result().numel * w.numel // w.shape[0], x, w)


def _transposed_flops(call: SizedCall) -> Flops:
    x, w = call.operands[:2]
    return Flops.of_product(2 * x.numel * w.numel // w.shape[0], x, w)


def _product(call: SizedCall) -> Multiplication:
    x, w = call.operands[:2]
    groups, result = max(1, x.shape[1] // w.shape[1]), call.result()
    positions = result.numel // result.shape[1]
    return Multiplication(
        MatrixProduct(groups, positions, max(1, w.shape[0] // groups), w.numel // w.shape[0]), x, w
    )


def _transposed_product(call: SizedCall) -> Multiplication:
    x, w = call.operands[:2]
    return Multiplication(MatrixProduct(1, x.numel // x.shape[1], w.numel // w.shape[0], x.shape[1]), x, w)


def _is_transposed(call: SizedCall) -> bool:
    """Whether aten.convolution(x, w, bias, stride, padding, dilation, transposed, ...) is transposed."""
    return bool(call.call.args[6])


declare(
    *(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution),
    *(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d),
    allows_tf32=True,
)
declare(aten.conv1d, aten.conv2d, aten.conv3d, flops=_flops, products=_product)
declare(
    *(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d),
    flops=_transposed_flops,
    products=_transposed_product,
)
declare(
    aten.convolution,
    flops=lambda call: (_transposed_flops if _is_transposed(call) else _flops)(call),
    products=lambda call: (_transposed_product if _is_transposed(call) else _product)(call),
)
