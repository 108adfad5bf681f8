"""Convolutions whose rows are split over the ranks of a group, without a copy of the input.

The operator is `torch.ops.autopar.convolution`; it takes the arguments of `aten.convolution` and a cut.
A convolution is linear in its input, so its own rows and those of its neighbours add up:

      held    a  |  own rows  |  b         y = conv(own, zero-padded)              all outputs
             [0]      [1]       [2]          + conv(a alone) + conv(b alone)       the first and last few

Only the *strips* a and b travel, while [1] is computed, and only the outputs beside them are corrected.
Backward, the gradients of a and b travel back, while [1] is differentiated, and are added to the rows
that they are copies of; the gradient of the weight is the sum of the three.

Rows are numbered from the first own row. Output o takes input row i by the tap t of the kernel where

      i = o stride - padding + dilation t          o = i stride - padding + dilation t  (transposed)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.core.operator_facts import declare
from autopar.runtime import registry
from autopar.runtime.collectives import groups, transport
from autopar.runtime.collectives.row_ranges import Rows, expect, overlap

aten = torch.ops.aten


# -- who holds whose rows -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Side:
    """One neighbour: the rows of its own that I hold, and the own rows that it holds."""

    peer: int  # its place in the group; at the ends of the tensor there is none, and both are empty
    held: Rows
    given: Rows


def sides(group: str, owned: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> tuple[Side, Side]:
    """Find the sides before and after this rank, whose outputs need the global rows [start, stop)."""
    return neighbours(groups.index(group), owned, starts, stops)


def neighbours(
    me: int, owned: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> tuple[Side, Side]:
    """The `sides` of the rank in place `me` of the group."""
    length = owned[-1]
    before = [first - max(start, 0) for first, start in zip(owned, starts, strict=False)]
    after = [min(stop, length) - last for last, stop in zip(owned[1:], stops, strict=True)]
    before, after = [0, *(max(0, rows) for rows in before), 0], [0, *(max(0, rows) for rows in after), 0]
    own = owned[me + 1] - owned[me]
    return (
        Side(me - 1, (-before[me + 1], 0), (0, after[me])),
        Side(me + 1, (own, own + after[me + 1]), (own - before[me + 2], own)),
    )


def _rows(x: Tensor, dim: int, rows: Rows) -> Tensor:
    return x.narrow(dim, rows[0], rows[1] - rows[0])


def _empty(x: Tensor, dim: int, rows: Rows) -> Tensor:
    return x.new_empty((*x.shape[:dim], rows[1] - rows[0], *x.shape[dim + 1 :]))


def _placed(x: Tensor, dim: int, rows: Rows, wanted: Rows) -> Tensor:
    """`x`, which lies in `rows`, cut or padded with zeros to the rows that are wanted."""
    if rows == wanted:
        return x
    pads = [0, 0] * (x.dim() - 1 - dim) + [rows[0] - wanted[0], wanted[1] - rows[1]]
    padded: Tensor = aten.constant_pad_nd(x, pads)
    return padded


# -- what a strip adds to ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Along:
    """A convolution along the split dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    transposed: bool

    def output(self, row: int, tap: int) -> int | None:
        """Output row that gets the input row by this tap; None if there is none."""
        if self.transposed:
            return row * self.stride - self.padding + self.dilation * tap
        output, between = divmod(row + self.padding - self.dilation * tap, self.stride)
        return None if between else output

    def reach(self, rows: Rows, taps: Rows) -> Rows:
        """The rows of the wider side that the taps touch over `rows` of the narrower side."""
        first, last = rows[0], rows[1] - 1
        return (
            first * self.stride - self.padding + self.dilation * taps[0],
            last * self.stride - self.padding + self.dilation * (taps[1] - 1) + 1,
        )


@dataclass(frozen=True, slots=True)
class Edge:
    """The convolution of one strip: unpadded, of its `rows` by the `taps`, it gives the `outputs`."""

    rows: Rows
    taps: Rows
    outputs: Rows


@cache
def edge(strip: Rows, length: int, along: Along) -> Edge | None:
    """The share of a strip's rows in the outputs [0, length); None if it has none.

    `rows` may be more or fewer than the strip's, and a transposed convolution's `outputs` reach outside: the
    caller pads and cuts.
    """
    hits = [
        (row, tap, output)
        for row in range(*strip)
        for tap in range(along.kernel)
        if (output := along.output(row, tap)) is not None and 0 <= output < length
    ]
    if not hits:
        return None
    rows, taps, outputs = ((min(each), max(each) + 1) for each in zip(*hits, strict=True))
    if along.transposed:
        return Edge(rows, taps, along.reach(rows, taps))
    return Edge(along.reach(outputs, taps), taps, outputs)


@dataclass(frozen=True, slots=True)
class ConvolutionArguments:
    """The arguments of `aten.convolution` after the bias, for the own rows; `dim` is split."""

    dim: int
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    @property
    def of_strips(self) -> tuple[Any, ...]:
        """The arguments for a strip, which is padded by hand."""
        padding, output_padding = list(self.padding), list(self.output_padding)
        padding[self.dim - 2] = output_padding[self.dim - 2] = 0
        return self.stride, padding, self.dilation, self.transposed, output_padding, self.groups

    def edges(self, both: Sequence[Side], kernel: int, length: int) -> Iterator[Edge | None]:
        """The edge on each side; `kernel` and `length` are those of the weight and the output along the
        dim."""
        at = self.dim - 2
        along = Along(kernel, self.stride[at], self.padding[at], self.dilation[at], self.transposed)
        return (edge(side.held, length, along) for side in both)


# -- kernels ------------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    owned: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the outputs, and both strips for backward."""
    call, both = ConvolutionArguments(*how), sides(group, owned, starts, stops)
    dim = call.dim
    expect(x, dim, both[1].held[0])
    before, after = strips = [_empty(x, dim, side.held) for side in both]
    under_way = transport.start(
        [(side.peer, _rows(x, dim, side.given)) for side in both],
        [(side.peer, strip) for side, strip in zip(both, strips, strict=True)],
        group,
    )
    y: Tensor = aten.convolution(x, weight, bias, *call.arguments)
    under_way.wait()
    length = y.shape[dim]
    for side, strip, at in zip(both, strips, call.edges(both, weight.shape[dim], length), strict=True):
        if at is not None:
            rows, taps = _placed(strip, dim, side.held, at.rows), _rows(weight, dim, at.taps)
            part = aten.convolution(rows, taps, None, *call.of_strips)
            inside = overlap(at.outputs, (0, length))
            _rows(y, dim, inside).add_(_placed(part, dim, at.outputs, inside))
    return y, before, after


def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    before: Tensor,
    after: Tensor,
    wanted: Sequence[bool],
    group: str,
    owned: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias that are `wanted`, else an empty tensor; the last two are
    this rank's own sums."""
    call, both = ConvolutionArguments(*how), sides(group, owned, starts, stops)
    dim, length = call.dim, gradient.shape[call.dim]
    slopes, of_taps = [], []
    for side, strip, at in zip(
        both, (before, after), call.edges(both, weight.shape[dim], length), strict=True
    ):
        slope = torch.zeros_like(strip) if at is None else strip
        if at is not None and (wanted[0] or wanted[1]):
            inside = overlap(at.outputs, (0, length))
            outer = _placed(_rows(gradient, dim, inside), dim, inside, at.outputs)
            rows, taps = _placed(strip, dim, side.held, at.rows), _rows(weight, dim, at.taps)
            mask = [wanted[0], wanted[1], False]
            inner, kernel, _ = aten.convolution_backward(outer, rows, taps, None, *call.of_strips, mask)
            slope = _placed(inner, dim, at.rows, side.held) if wanted[0] else strip
            of_taps.append((at.taps, kernel))
        slopes.append(slope)
    landed = [_empty(x, dim, side.given if wanted[0] else (0, 0)) for side in both]
    under_way = transport.start(
        [(side.peer, slope) for side, slope in zip(both, slopes, strict=True) if wanted[0]],
        [(side.peer, slot) for side, slot in zip(both, landed, strict=True)],
        group,
    )
    bias_sizes = [gradient.shape[1]]
    found = aten.convolution_backward(gradient, x, weight, bias_sizes, *call.arguments, list(wanted))
    under_way.wait()
    if wanted[0]:
        for side, slot in zip(both, landed, strict=True):
            _rows(found[0], dim, side.given).add_(slot)
    if wanted[1]:
        for tap, kernel in of_taps:
            _rows(found[1], dim, tap).add_(kernel)
    return _given(x, found)


def _given(x: Tensor, found: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """An operator has no optional results: empty tensors stand for gradients that are not wanted."""
    one, two, three = (x.new_empty(0) if each is None else each for each in found)
    return one, two, three


# -- registration -------------------------------------------------------------------------------


def _forward_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    owned, starts, stops, *how = rest
    call, (before, after) = ConvolutionArguments(*how), sides(group, owned, starts, stops)
    expect(x, call.dim, after.held[0])
    y = aten.convolution(x, weight, bias, *call.arguments)
    return y, _empty(x, call.dim, before.held), _empty(x, call.dim, after.held)


def _backward_shape(
    gradient: Tensor, x: Tensor, weight: Tensor, before: Tensor, after: Tensor, wanted: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call = ConvolutionArguments(*rest[4:])
    sizes, mask = [gradient.shape[1]], list(wanted)
    found = aten.convolution_backward(gradient, x, weight, sizes, *call.arguments, mask)
    return _given(x, found)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, *ctx.arguments = inputs
    _, before, after = output
    ctx.save_for_backward(x, weight, before, after)
    ctx.mark_non_differentiable(before, after)


def _differentiate(ctx: Any, gradient: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    back = registry.operator("convolution_backward")(gradient, *ctx.saved_tensors, wanted, *ctx.arguments)
    slopes = [slope if want else None for slope, want in zip(back, wanted, strict=True)]
    return (*slopes, *(None for _ in ctx.arguments))


def _convolution(*arguments: Any) -> Tensor:
    y: Tensor = registry.operator("convolution_forward")(*arguments)[0]
    return y


CUT = "str group, int[] owned, int[] starts, int[] stops"
HOW = (
    "int dim, int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
)
registry.functional(
    "convolution_forward",
    f"(Tensor x, Tensor weight, Tensor? bias, {CUT}, {HOW}) -> (Tensor, Tensor, Tensor)",
    _forward,
    shape=_forward_shape,
    setup=_setup,
    backward=_differentiate,
)
registry.functional(
    "convolution_backward",
    f"(Tensor gradient, Tensor x, Tensor weight, Tensor before, Tensor after, bool[] wanted, {CUT}, {HOW})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    shape=_backward_shape,
)
registry.composite(
    "convolution", f"(Tensor x, Tensor weight, Tensor? bias, {CUT}, {HOW}) -> Tensor", _convolution
)


def local_convolution(operands: Sequence[Any], how: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The overload of a convolution of local rows, and its arguments."""
    stride, padding, dilation, transposed, extra, groups = how
    space = f"{len(stride)}d"
    if not transposed:
        return getattr(aten, f"conv{space}").default, (*operands, stride, padding, dilation, groups)
    packet = getattr(aten, f"conv_transpose{space}")
    target = packet.default if space == "1d" else packet.input
    return target, (*operands, stride, padding, extra, groups, dilation)


declare(
    registry.operator("convolution"),
    local_form=lambda args: local_convolution(args[:3], args[-6:]),
)
