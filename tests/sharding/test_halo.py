"""Halos: rows fetched from any number of ranks, in two dims with corners, over two axes on one dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.mesh import Mesh, parse_key
from autopar.core.strategy import Strategy
from autopar.proof.operators import OneOperator, error, program_for
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Sample
from autopar.sharding.strategies import find_atoms, strategies_of

aten = torch.ops.aten
SMALL = st.integers(1, 4)


def sharded(sample: Sample, mesh: Mesh, factors: Sequence[str]) -> tuple[OneOperator, Dims, Strategy]:
    """The strategy that gives `factors` to the mesh's axes, in order."""
    one = OneOperator(sample)
    dims = Dims(one.graph, find_atoms(one.graph), mesh)
    for strategy in strategies_of(one.graph.operators[0], dims):
        if [option.factor for option in strategy] == list(factors):
            return one, dims, strategy
    raise LookupError(f"{factors} not offered")


def halos(one: OneOperator, dims: Dims, strategy: Strategy) -> list[dict[str, Any]]:
    """The arguments of every operator in rank 0's program that takes rows of other ranks."""
    program = rewrite(one.graph, program_for(one.graph, strategy, dims), dims, rank=0)
    nodes = [node for node in program.emitter.graph.nodes if node.op == "call_function"]
    return [
        {"of": node.target._schema.name, **dict(zip(_names(node.target), node.args, strict=True))}
        for node in nodes
        if node.target in (torch.ops.autopar.exchange.default, torch.ops.autopar.convolution.default)
    ]


def _names(target: Any) -> list[str]:
    return [item.name for item in target._schema.arguments]


def convolution(*shape: int, kernel: Sequence[int], **kwargs: Any) -> Sample:
    space = len(shape) - 2
    target = getattr(aten, f"conv{space}d").default
    each = {name: [kwargs.get(name, default)] * space for name, default in (("stride", 1), ("dilation", 1))}
    padding = kwargs.get("padding", [(size - 1) // 2 for size in kernel])
    return Sample(
        target,
        (
            torch.randn(shape),
            torch.randn(2, shape[1], *kernel),
            None,
            each["stride"],
            padding,
            each["dilation"],
        ),
    )


def test_the_drawing_in_the_docstring() -> None:
    found = sharded(convolution(1, 1, 14, kernel=[3]), Mesh((3,)), ["w"])
    (halo,) = halos(*found)
    assert halo["owned"] == [0, 5, 10, 14]
    assert halo["starts"] == [-1, 4, 9] and halo["stops"] == [6, 11, 15]
    assert error(*found) < 1e-12


def test_a_window_wider_than_a_shard_reaches_over_several_ranks() -> None:
    found = sharded(convolution(1, 2, 9, kernel=[9]), Mesh((4,)), ["w"])
    (halo,) = halos(*found)
    assert halo["starts"][0] < 0 and halo["stops"][0] > halo["owned"][2]
    assert error(*found) < 1e-12


def test_corners_come_with_the_second_dim() -> None:
    found = sharded(convolution(2, 1, 7, 9, kernel=[3, 5]), Mesh((2, 2)), ["h", "w"])
    columns, rows = halos(*found)
    assert (rows["group"], rows["dim"]) == ("a@2x2", 2) and (columns["group"], columns["dim"]) == ("b@2x2", 3)
    assert (columns["of"], rows["of"]) == ("autopar::exchange", "autopar::convolution")
    assert error(*found) < 1e-12


@pytest.mark.parametrize("mesh", [Mesh((2, 2)), Mesh((2, 3)), Mesh((2, 2, 2))], ids=str)
def test_axes_that_share_a_dim_exchange_among_all_their_ranks(mesh: Mesh) -> None:
    found = sharded(convolution(1, 2, 11, kernel=[5], stride=1), mesh, ["w"] * len(mesh.shape))
    (halo,) = halos(*found)
    assert parse_key(halo["group"]) == (mesh, mesh.axes)
    assert len(halo["owned"]) == mesh.num_devices + 1
    assert error(*found) < 1e-12


def test_rows_that_need_no_exchange_are_not_exchanged() -> None:
    x = torch.randn(1, 2, 12, 8)
    assert halos(*sharded(Sample(aten.max_pool2d.default, (x, [2, 2])), Mesh((3,)), ["h"])) == []
    assert halos(*sharded(convolution(1, 2, 12, 8, kernel=[1, 3]), Mesh((3,)), ["h"])) == []
    assert len(halos(*sharded(convolution(1, 2, 12, 8, kernel=[1, 3]), Mesh((3,)), ["w"]))) == 1


MESHES = st.sampled_from([Mesh((2,)), Mesh((3,)), Mesh((4,)), Mesh((2, 2)), Mesh((2, 3))])


def prove(sample: Sample, mesh: Mesh) -> None:
    try:
        found = sharded(sample, mesh, ["w"] * len(mesh.shape))
    except LookupError:
        assume(False)
    assert error(*found) < 1e-9


@settings(max_examples=40)
@given(st.integers(4, 17), SMALL, SMALL, st.integers(0, 4), st.integers(1, 3), MESHES)
def test_any_convolution(
    length: int, kernel: int, stride: int, padding: int, dilation: int, mesh: Mesh
) -> None:
    assume(length + 2 * padding > dilation * (kernel - 1))
    prove(
        convolution(1, 1, length, kernel=[kernel], stride=stride, padding=[padding], dilation=dilation), mesh
    )


@settings(max_examples=40)
@given(st.integers(4, 12), SMALL, SMALL, st.integers(0, 3), st.integers(1, 3), MESHES, st.data())
def test_any_transposed_convolution(
    length: int, kernel: int, stride: int, padding: int, dilation: int, mesh: Mesh, data: st.DataObject
) -> None:
    extra = data.draw(st.integers(0, max(stride, dilation) - 1))
    assume((length - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 > 0)
    x, weight = torch.randn(1, 2, length), torch.randn(2, 1, kernel)
    args = (x, weight, torch.randn(1), [stride], [padding], [extra], 1, [dilation])
    prove(Sample(aten.conv_transpose1d.default, args), mesh)


@settings(max_examples=40)
@given(st.integers(4, 17), SMALL, SMALL, st.booleans(), st.booleans(), MESHES, st.data())
def test_any_pooling(
    length: int, kernel: int, stride: int, ceil: bool, include: bool, mesh: Mesh, data: st.DataObject
) -> None:
    padding, dilation = data.draw(st.integers(0, kernel // 2)), data.draw(st.integers(1, 2))
    x = torch.randn(1, 2, length)
    assume(length + 2 * padding > dilation * (kernel - 1))
    prove(Sample(aten.avg_pool1d.default, (x, [kernel], [stride], [padding], ceil, include)), mesh)
    largest = aten.max_pool1d_with_indices.default
    prove(Sample(largest, (x, [kernel], [stride], [padding], [dilation], ceil)), mesh)


@settings(max_examples=40)
@given(st.integers(3, 12), st.integers(2, 4), st.sampled_from(["nearest", "linear"]), MESHES)
def test_any_enlargement(length: int, factor: int, mode: str, mesh: Mesh) -> None:
    args = (torch.randn(1, 2, length), None, *([False] if mode == "linear" else []), [float(factor)])
    prove(Sample(getattr(aten, f"upsample_{mode}1d").vec, args), mesh)


@settings(max_examples=40)
@given(st.integers(4, 14), st.integers(-3, 4), st.integers(-3, 4), st.integers(1, 4), MESHES)
def test_any_pad_crop_and_slice(length: int, left: int, right: int, step: int, mesh: Mesh) -> None:
    assume(length + left + right > 0)
    x = torch.randn(2, length)
    for sample in (
        Sample(aten.constant_pad_nd.default, (x, [left, right], 1.5)),
        Sample(aten.slice.Tensor, (x, 1, max(0, left), length - 1, step)),
    ):
        one = OneOperator(sample)
        dims = Dims(one.graph, find_atoms(one.graph), mesh)
        for strategy in strategies_of(one.graph.operators[0], dims):
            if all(option.factor == "d1" for option in strategy):
                assert error(one, dims, strategy) < 1e-9
