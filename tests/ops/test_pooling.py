"""Average pooling whose last window is cut short, split by domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.mesh import Mesh
from autopar.proof.operators import error, strategies
from autopar.sharding.rule import Sample

aten = torch.ops.aten
TARGETS = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
MESHES = {1: [Mesh((2,)), Mesh((3,)), Mesh((2, 2))], 2: [Mesh((2,)), Mesh((2, 2))], 3: [Mesh((2,))]}


def by_domain(factors: Sequence[str]) -> bool:
    return all(factor[0] in "dhw" for factor in factors)


def check(sample: Sample, mesh: Mesh) -> int:
    """How many strategies split every axis by domain; all of them equal the unsplit call."""
    count = 0
    for one, dims, strategy in strategies(sample, mesh):
        if by_domain([option.factor for option in strategy]):
            assert error(one, dims, strategy) < 1e-12, (sample.args[1:], str(mesh), list(map(str, strategy)))
            count += 1
    return count


def outputs(rows: int, kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """Whole windows, and all of them with one that is cut short: torch takes one that begins inside the
    image or its first padding."""
    whole = (rows + 2 * padding - kernel) // stride + 1
    every = -(-(rows + 2 * padding - kernel) // stride) + 1
    return whole, every - ((every - 1) * stride >= rows + padding)


def windows(most: int) -> list[tuple[int, int, int, int]]:
    """Rows of an image, and kernel, stride and padding of windows on these."""
    return [
        (rows, kernel, stride, padding)
        for rows in range(2, most + 1)
        for kernel in range(1, min(4, rows) + 1)
        for stride in range(1, 5)
        for padding in range(kernel // 2 + 1)
    ]


def is_cut(window: tuple[int, int, int, int]) -> bool:
    whole, every = outputs(*window)
    return every > whole


@st.composite
def cut_short(draw: st.DrawFn) -> Sample:
    """A call in which at least one dim has a window that reaches past the image and its padding."""
    space = draw(st.integers(1, 3))
    found = windows({1: 17, 2: 9, 3: 6}[space])
    dims = [draw(st.sampled_from(found)) for _ in range(space - 1)]
    dims.insert(draw(st.integers(0, space - 1)), draw(st.sampled_from(list(filter(is_cut, found)))))
    rows, kernel, stride, padding = map(list, zip(*dims, strict=True))
    counts = [outputs(*each) for each in dims]
    include = draw(st.booleans())
    x = torch.arange(1.0, 1 + 2 * torch.Size(rows).numel()).sqrt().view(1, 2, *rows)
    args: tuple[Any, ...] = (x, kernel, stride, padding, True, include)
    if space > 1:
        args = (*args, draw(st.sampled_from([None, None, 1, 5, -2])))
    sample = Sample(TARGETS[space - 1], args)
    assert list(TARGETS[space - 1](*args).shape[2:]) == [every for _, every in counts]
    return sample


@settings(max_examples=60)
@given(cut_short())
@example(Sample(TARGETS[0], (torch.arange(12.0).view(1, 1, 12), [4], [3], [2], True, True)))
def test_a_window_that_is_cut_short_keeps_its_divisor(sample: Sample) -> None:
    for mesh in MESHES[len(sample.args[1])]:
        check(sample, mesh)


CUT: dict[str, tuple[Any, tuple[int, ...], tuple[list[int], list[int], list[int]]]] = {
    "1d": (
        TARGETS[0],
        (10,),
        ([4], [3], [1]),
    ),  # windows -1..2, 2..5, 5..8 and 8..11, the padding's row is 10
    "2d": (TARGETS[1], (10, 11), ([4, 2], [3, 2], [1, 0])),
    "3d": (TARGETS[2], (5, 4, 7), ([2, 3, 4], [2, 2, 2], [0, 1, 2])),
}


@pytest.mark.parametrize("include", [True, False], ids=["padding counts", "padding left out"])
@pytest.mark.parametrize("name", CUT)
def test_cut_windows_are_split_by_each_dim(name: str, include: bool) -> None:
    target, rows, windows = CUT[name]
    assert all(every > whole for whole, every in map(outputs, rows, *windows))
    for divisor in (None, 5) if len(rows) > 1 else (None,):
        args = (torch.randn(2, 1, *rows), *windows, True, include)
        sample = Sample(target, args if divisor is None else (*args, divisor))
        assert check(sample, Mesh((2,))) == len(rows)
        if len(rows) < 3:
            assert check(sample, Mesh((2, 2))) == len(rows) ** 2
