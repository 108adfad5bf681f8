"""Windows name exactly the rows that outputs read: found again by autograd on the real operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from autopar.ops.resize import MOST_EXACT_FACTOR, Interpolation, Lerp
from autopar.sharding.window import RowMap, Window

SMALL = st.integers(1, 4)


def read_rows(result: Tensor, source: Tensor, start: int, stop: int) -> list[int]:
    """The rows of `source` that `result[start:stop]` depends on."""
    (gradient,) = torch.autograd.grad(result.flatten()[start:stop].sum(), source)
    return gradient.flatten().nonzero().flatten().tolist()


def check(window: RowMap, source: Tensor, result: Tensor, data: st.DataObject, *, gaps: bool = False) -> None:
    length, extent = source.numel(), result.numel()
    start = data.draw(st.integers(0, extent - 1))
    stop = data.draw(st.integers(start + 1, extent))
    low, high = window.needs(start, stop)
    rows = read_rows(result, source, start, stop)
    assert all(low <= row < high for row in rows)
    if not gaps and rows and stop - start == 1:  # a range of outputs may span rows that none of them reads
        clipped = (max(low, 0), min(high, length))
        assert (rows[0], rows[-1] + 1) == clipped
    assert high - low >= 1


@given(st.integers(1, 14), SMALL, SMALL, st.integers(0, 4), st.integers(1, 3), st.data())
def test_convolution(
    length: int, kernel: int, stride: int, padding: int, dilation: int, data: st.DataObject
) -> None:
    assume(length + 2 * padding > dilation * (kernel - 1))
    source = torch.ones(1, 1, length, requires_grad=True)
    result = F.conv1d(source, torch.ones(1, 1, kernel), None, stride, padding, dilation)
    check(Window(kernel, stride, padding, dilation), source, result, data, gaps=dilation > 1)


@given(st.integers(1, 14), SMALL, SMALL, st.booleans(), st.data())
def test_average_pooling(length: int, kernel: int, stride: int, ceil: bool, data: st.DataObject) -> None:
    padding = data.draw(st.integers(0, kernel // 2))
    assume(length + 2 * padding >= kernel)
    source = torch.ones(1, 1, length, requires_grad=True)
    result = F.avg_pool1d(source, kernel, stride, padding, ceil)
    check(Window(kernel, stride, padding), source, result, data)


@given(st.integers(1, 9), SMALL, SMALL, st.integers(0, 3), st.integers(1, 3), st.data())
def test_transposed_convolution(
    length: int, kernel: int, stride: int, padding: int, dilation: int, data: st.DataObject
) -> None:
    extra = data.draw(st.integers(0, max(stride, dilation) - 1))
    extent = (length - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1
    assume(extent > 0)
    source = torch.ones(1, 1, length, requires_grad=True)
    result = F.conv_transpose1d(source, torch.ones(1, 1, kernel), None, stride, padding, extra, 1, dilation)
    assert result.numel() == extent
    window = Window(kernel, stride, padding, dilation, transposed=True)
    check(window, source, result, data, gaps=True)
    low, high = window.needs(0, extent)
    local = (high - 1) * stride - padding + dilation * (kernel - 1)
    assert low * stride - padding <= 0 and local >= extent - 1 - extra  # the local output covers the gap


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_nearest(length: int, factor: int, data: st.DataObject) -> None:
    source = torch.ones(1, 1, length, requires_grad=True)
    result = F.interpolate(source, scale_factor=float(factor))
    check(Window(factor, factor, transposed=True), source, result, data)


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_linear_interpolation(length: int, factor: int, data: st.DataObject) -> None:
    source = torch.rand(1, 1, length, dtype=torch.float64, requires_grad=True)
    result = F.interpolate(source, scale_factor=float(factor), mode="linear")
    check(Interpolation(factor, length, reach=1), source, result, data, gaps=True)


@given(st.integers(1, 12), st.integers(1, 30), st.booleans(), st.data())
def test_linear_interpolation_by_any_ratio(
    length: int, extent: int, align: bool, data: st.DataObject
) -> None:
    source = torch.rand(1, 1, length, dtype=torch.float64, requires_grad=True)
    result = F.interpolate(source, size=extent, mode="linear", align_corners=align)
    step = (length - 1) / max(1, extent - 1) if align else length / extent
    check(Lerp(length, extent, step, align), source, result, data, gaps=True)


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_cubic_interpolation(length: int, factor: int, data: st.DataObject) -> None:
    source = torch.rand(1, 1, 1, length, dtype=torch.float64, requires_grad=True)
    result = F.interpolate(source, size=(1, length * factor), mode="bicubic")
    check(Interpolation(factor, length, reach=2), source, result, data, gaps=True)


def test_nearest_rows_are_those_of_exact_division() -> None:
    for factor in range(1, MOST_EXACT_FACTOR + 1):
        rows = torch.arange(300.0).reshape(1, 1, -1)
        assert torch.equal(
            F.interpolate(rows, scale_factor=float(factor)), rows.repeat_interleave(factor, dim=2)
        )
