"""`as_strided` of dense tensors is written by operators on elements that give the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.trace.export import trace
from autopar.trace.forward.strided_windows import windows
from autopar.trace.target import Target


@pytest.mark.parametrize(
    ("shape", "size", "stride"),
    [
        ((2, 3, 4, 5), (2, 5, 4, 5), (60, 10, 5, 1)),  # Longformer's chunks, which overlap by half
        ((3, 20), (3, 5, 8), (20, 3, 1)),  # frames of sounds
        ((6, 4), (4, 6), (1, 4)),  # transposed
        ((6, 4), (2, 3, 4), (12, 4, 1)),
        ((6, 4), (6, 2), (4, 1)),
        ((7,), (2, 3), (3, 1)),  # of 7 elements 6
        ((2, 6), (2, 1, 5, 2), (6, 99, 1, 1)),
    ],
)
def test_windows_are_what_as_strided_gives(
    shape: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for source in (x, x.transpose(0, -1)):
        wanted, found = source.as_strided(size, stride), windows(source, size, stride)
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        weights = torch.randn_like(wanted)
        torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, wanted)))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=3))
def test_what_windows_give_is_right_wherever_they_give_something(dims: list[tuple[int, int]]) -> None:
    size, stride = zip(*dims, strict=True)
    x = torch.arange(40).view(5, 8)
    found = windows(x, size, stride)
    assert found is None or torch.equal(found, x.as_strided(size, stride))


@pytest.mark.parametrize(
    ("x", "size", "stride", "offset"),
    [
        (torch.randn(4, 6)[:, :5], (3, 2), (2, 1), None),
        (torch.randn(4, 6), (3, 2), (2, 1), 5),
        (torch.randn(4, 6), (3, 2), (0, 1), None),
        (torch.randn(4, 6), (4, 6), (7, 1), None),  # diagonals
    ],
)
def test_what_depends_on_the_order_of_memory_is_left(
    x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None
) -> None:
    assert windows(x, size, stride, offset) is None


class Chunks(nn.Module):
    """Products of overlapping chunks, as Longformer's attention takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x.transpose(0, 1)).transpose(0, 1)
        h = h.view(h.size(0), 3, 4, 4)
        size, stride = list(h.size()), list(h.stride())
        size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
        chunks = h.as_strided(size=size, stride=stride)
        return torch.einsum("bcxd,bcyd->bcxy", chunks, chunks).square().sum()


def test_a_model_of_chunks_is_split_with_its_samples() -> None:
    x = torch.randn(4, 12, 3)
    graph = trace(Chunks(), (x,)).graph
    assert not any("as_strided" in str(item.target) for item in graph.operators)
    target = Target(Chunks(), (x,), {}, None, "test")
    report = api.verify(target, ClusterSpec.local(2), steps=2, force="batch", changes=0)
    assert report.passed
