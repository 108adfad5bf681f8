"""Convolutions on real processes are their simulated meaning and the serial one, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.core.mesh import Mesh, parse_key
from autopar.errors import CheckError, InputError
from autopar.proof.simulated import simulate
from autopar.runtime.collectives import groups, placement_moves
from autopar.runtime.collectives.convolution import Along, edge
from tests.pool import Pool
from tests.runtime.collectives.cases import TIMEOUT, all_keys, groups_of

assert placement_moves  # its import registers the operators
Pools = Callable[[int], Pool]
ops = torch.ops.autopar


@dataclass(frozen=True)
class Split:
    """A convolution of rows that lie in `cut`; `outputs` is its cut, by which gradients are split."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cut: list[int]
    outputs: list[int]
    needs: tuple[list[int], list[int]]
    how: tuple[Any, ...]  # from stride to groups, but the output padding of each rank
    extras: list[int]
    dim: int = 2

    def serial(self) -> Tensor:
        stride, padding, dilation, transposed, extra, count = self.how
        extra = list(extra)
        extra[self.dim - 2] = self.extras[-1]
        return torch.convolution(
            self.x, self.weight, self.bias, stride, padding, dilation, transposed, extra, count
        )

    def arguments(self, key: str, place: int) -> tuple[Any, ...]:
        """After x, weight and bias."""
        stride, padding, dilation, transposed, extra, count = self.how
        extra = list(extra)
        extra[self.dim - 2] = self.extras[place]
        how = (stride, padding, dilation, transposed, extra, count)
        return (key, self.cut, *self.needs, self.dim, *how)

    def part(self, x: Tensor, place: int, cut: Sequence[int]) -> Tensor:
        return x.narrow(self.dim, cut[place], cut[place + 1] - cut[place]).contiguous()


def same(
    cut: list[int], kernel: int, *, dilation: int = 1, count: int = 1, dim: int = 2, bias: bool = True
) -> Split:
    """A 'same' convolution; each rank needs as many rows on both sides."""
    reach = dilation * (kernel - 1) // 2
    shape = [2, 4, 5, 5]
    shape[dim] = cut[-1]
    weight = _randn(6, 4 // count, kernel, kernel)
    starts, stops = [first - reach for first in cut[:-1]], [stop + reach for stop in cut[1:]]
    how = ([1, 1], [reach, reach], [dilation, dilation], False, [0, 0], count)
    none = [0] * (len(cut) - 1)
    return Split(
        _randn(*shape), weight, _randn(6) if bias else None, cut, cut, (starts, stops), how, none, dim
    )


def strided(cut: list[int]) -> Split:
    """Kernel 3, stride 2: nothing is needed from the next rank."""
    outputs = [-(-row // 2) for row in cut]
    starts, stops = [first - 1 for first in cut[:-1]], [2 * stop for stop in outputs[1:]]
    how = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    x, weight = _randn(2, 4, cut[-1], 5), _randn(3, 4, 3, 3)
    return Split(x, weight, _randn(3), cut, outputs, (starts, stops), how, [0] * (len(cut) - 1))


def transposed(cut: list[int]) -> Split:
    """Kernel 3, stride 2, and an odd number of outputs: one row is needed from the next rank."""
    outputs = [*(2 * row for row in cut[:-1]), 2 * cut[-1] - 1]
    stops = [*(stop + 1 for stop in cut[1:-1]), cut[-1]]
    how = ([2, 2], [1, 1], [1, 1], True, [0, 1], 2)
    x, weight = _randn(2, 4, cut[-1], 5), _randn(4, 3, 3, 3)
    extras = [*(1 for _ in cut[2:]), 0]
    return Split(x, weight, _randn(6), cut, outputs, (cut[:-1], stops), how, extras)


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def cases(size: int) -> list[Split]:
    cut = [0, 4, 7, 12][: size + 1]
    even = [0, 4, 6, 11][: size + 1]
    return [
        same(cut, 3),
        same(cut, 5, bias=False),
        same(cut, 3, dilation=2, count=2),
        same(cut, 3, dim=3),
        strided(even),
        transposed(cut),
    ]


def _execute(key: str, splits: list[Split], gradients: list[Tensor]) -> list[list[Tensor | None]]:
    """On a worker: the output and the gradients of x, weight and bias."""
    mesh = parse_key(key)[0]
    groups.setup(mesh, all_keys(mesh), timeout=TIMEOUT)
    place = groups.index(key)
    found = []
    for split, gradient in zip(splits, gradients, strict=True):
        x = split.part(split.x, place, split.cut).requires_grad_()
        weight = split.weight.clone().requires_grad_()
        bias = None if split.bias is None else split.bias.clone().requires_grad_()
        y = ops.convolution(x, weight, bias, *split.arguments(key, place))
        y.backward(split.part(gradient, place, split.outputs))
        found.append([y.detach(), x.grad, weight.grad, None if bias is None else bias.grad])
    return found


@pytest.mark.parametrize("key", ["a@2", "a@3", "b@2x2", "a@1x3", "b@1x3"])
def test_it_is_serial_and_its_simulated_meaning(key: str, pools: Pools) -> None:
    torch.manual_seed(0)
    mesh, axes = parse_key(key)
    size = len(mesh.group(axes, 0))
    splits = cases(size)
    wanted = []
    for split in splits:
        x, weight, bias = (
            None if each is None else each.clone().requires_grad_()
            for each in (split.x, split.weight, split.bias)
        )
        stand_in = Split(
            x, weight, bias, *(getattr(split, name) for name in list(Split.__dataclass_fields__)[3:])
        )
        y = stand_in.serial()
        gradient = torch.randn_like(y)
        y.backward(gradient)
        wanted.append((y.detach(), gradient, x.grad, weight.grad, None if bias is None else bias.grad))
    results = pools(mesh.num_devices).run(_execute, key, splits, [item[1] for item in wanted])
    for number, (split, (y, _, *slopes)) in enumerate(zip(splits, wanted, strict=True)):
        for ranks in groups_of(key):
            ys, xs, weights, biases = zip(*(results[rank][number] for rank in ranks), strict=True)
            torch.testing.assert_close(torch.cat(ys, split.dim), y)
            torch.testing.assert_close(torch.cat(xs, split.dim), slopes[0])
            torch.testing.assert_close(sum(weights), slopes[1])
            if split.bias is not None:
                torch.testing.assert_close(sum(biases), slopes[2])
        calls = [
            (
                (
                    split.part(split.x, place, split.cut),
                    split.weight,
                    split.bias,
                    *split.arguments(key, place),
                ),
                {},
            )
            for place in range(size)
        ]
        torch.testing.assert_close(torch.cat(simulate(ops.convolution.default, calls), split.dim), y)


def _with_frozen() -> list[tuple[bool, ...]]:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    place, found = groups.index("a@2"), []
    split = same([0, 4, 7], 3)
    for requires_grad in ((True, False), (False, True), (False, False)):
        x = split.part(split.x, place, split.cut).requires_grad_(requires_grad[0])
        weight = split.weight.clone().requires_grad_(requires_grad[1])
        assert split.bias is not None
        bias = split.bias.clone().requires_grad_()
        ops.convolution(x, weight, bias, *split.arguments("a@2", place)).sum().backward()
        found.append((x.grad is not None, weight.grad is not None, bias.grad is not None))
    return found


def test_what_is_frozen_gets_no_gradient(pools: Pools) -> None:
    for found in pools(2).run(_with_frozen):
        assert found == [(True, False, True), (False, True, True), (False, False, True)]


def _twice() -> str:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    place, split = groups.index("a@2"), same([0, 4, 7], 3)
    x = split.part(split.x, place, split.cut).requires_grad_()
    y = ops.convolution(x, split.weight, None, *split.arguments("a@2", place))
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        slope.sum().backward()
    except InputError as error:
        return error.where
    return "differentiated twice"


def test_a_second_derivative_is_refused(pools: Pools) -> None:
    for found in pools(2).run(_twice):
        assert found == "autopar::convolution_backward"


def _registration() -> None:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    place = groups.index("a@2")
    for split in (same([0, 4, 7], 3), transposed([0, 4, 7])):
        x = split.part(split.x, place, split.cut).requires_grad_()
        assert split.bias is not None
        learned = split.weight.clone().requires_grad_(), split.bias.clone().requires_grad_()
        arguments = (x, *learned, *split.arguments("a@2", place))
        torch.library.opcheck(ops.convolution_forward.default, arguments)
        torch.library.opcheck(ops.convolution.default, arguments)


def test_torch_accepts_the_registration(pools: Pools) -> None:
    pools(2).run(_registration)


def test_a_tensor_of_another_length_is_refused() -> None:
    split = same([0, 4, 7], 3)
    with pytest.raises(CheckError, match="dim 2"):
        ops.convolution(split.x.to("meta"), split.weight.to("meta"), None, *split.arguments("a@2", 0))


def _channels_last() -> tuple[Tensor, Tensor, bool]:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    torch.manual_seed(1)
    place, split = groups.index("a@2"), same([0, 4, 7], 3)
    x = split.part(split.x, place, split.cut)
    last = x.contiguous(memory_format=torch.channels_last)
    ours, theirs = (
        ops.convolution(each, split.weight, split.bias, *split.arguments("a@2", place)) for each in (last, x)
    )
    return ours.contiguous(), theirs, ours.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_stays(pools: Pools) -> None:
    for ours, theirs, stays in pools(2).run(_channels_last):
        torch.testing.assert_close(ours, theirs)
        assert stays


@settings(max_examples=200)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(0, 4), st.integers(1, 3), st.booleans(),
    st.integers(-4, 9), st.integers(1, 4), st.integers(1, 8),
)  # fmt: skip
def test_an_edge_is_what_the_strip_alone_adds(
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    transposed: bool,
    first: int,
    count: int,
    length: int,
) -> None:
    """Beside the matrix of the convolution, built entry by entry."""
    strip, along = (first, first + count), Along(kernel, stride, padding, dilation, transposed)
    wanted = torch.zeros(length, count, kernel)
    for output in range(length):
        for row in range(*strip):
            for tap in range(kernel):
                wide, narrow = (output, row) if transposed else (row, output)
                wanted[output, row - first, tap] = wide == narrow * stride - padding + dilation * tap
    found, at = torch.zeros_like(wanted), edge(strip, length, along)
    if at is not None:
        for output in range(*at.outputs):
            for row in range(*at.rows):
                for tap in range(*at.taps):
                    if 0 <= output < length and strip[0] <= row < strip[1]:
                        wide, narrow = (output, row) if transposed else (row, output)
                        start = (at.outputs if transposed else at.rows)[0]
                        base = (at.rows if transposed else at.outputs)[0]
                        hit = wide - start == (narrow - base) * stride + dilation * (tap - at.taps[0])
                        found[output, row - first, tap] = hit
    torch.testing.assert_close(found, wanted)
