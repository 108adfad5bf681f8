"""Operands that are made up are such as every operator takes."""

from __future__ import annotations

import pytest
import torch

from autopar.core.graph import Call, TensorSpec
from costdb.operands import fill, random

aten = torch.ops.aten
CPU = torch.device("cpu")
NUMBERS, FLOATS, MASK = torch.int64, torch.float32, torch.bool


def made(*operands: TensorSpec) -> tuple[torch.Tensor, ...]:
    call = Call(aten.cat.default, (operands,), {})
    return fill(call, CPU, random(call, CPU))[2]


def spec(*shape: int, dtype: torch.dtype, requires_grad: bool = False) -> TensorSpec:
    return TensorSpec(shape, dtype, requires_grad)


def test_floats_lie_where_roots_and_logarithms_do() -> None:
    torch.manual_seed(0)
    one, two = made(spec(100, 3, dtype=FLOATS, requires_grad=True), spec(5, dtype=torch.float64))
    assert one.shape == (100, 3) and one.requires_grad and not two.requires_grad
    assert two.dtype == torch.float64
    assert 0.5 <= one.min() < 0.6 and 1.4 < one.max() < 1.5


@pytest.mark.parametrize(
    ("shapes", "below"),
    [
        ([(7, 3), (4,)], 3),  # the shortest dim of any
        ([(0, 5)], 5),  # but for empty ones
        ([(1,)], 1),
        ([], 1),
        ([()], 1),
    ],
)
def test_whole_numbers_are_indices_along_every_dim_of_what_is_not_whole(
    shapes: list[tuple[int, ...]], below: int
) -> None:
    *_, numbers = made(*(spec(*shape, dtype=FLOATS) for shape in shapes), spec(2, 6, dtype=NUMBERS))
    assert numbers.shape == (2, 6) and numbers.dtype == NUMBERS
    assert numbers.flatten().tolist() == [place % below for place in range(12)]


def test_masks_keep_everything() -> None:
    (mask,) = made(spec(2, 3, dtype=MASK))
    assert mask.dtype == MASK and mask.all()


def test_groups_of_rows_are_of_one_length_and_take_all_rows() -> None:
    rows, matrices = spec(10, 8, dtype=torch.bfloat16), spec(4, 8, 16, dtype=torch.bfloat16)
    call = Call(aten._grouped_mm.default, (rows, matrices, spec(4, dtype=torch.int32)), {})
    *_, ends = fill(call, CPU, random(call, CPU))[2]
    assert ends.tolist() == [2, 5, 7, 10] and ends.dtype == torch.int32
