"""A batch in parts: where samples lie, how many each part has, and what its loss counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.core.cutting import Count, Cutting, Rows
from autopar.core.graph import Operator, Ref
from autopar.errors import InputError
from autopar.trace.micro_batches import cut, mask_seed, number_of, split_batch

aten = torch.ops.aten
TEN = Cutting((Rows(0),), 10)


def test_longer_parts_come_first_and_what_has_no_rows_is_passed_whole() -> None:
    x, mask, table = torch.arange(10.0).view(10, 1), torch.ones(3, 10), torch.ones(10, 2)
    parts = split_batch(Cutting((Rows(0), Rows(1), None), 10), [x, mask, table], 4)
    assert [len(part.tensors[0]) for part in parts] == [3, 3, 2, 2]
    assert [part.tensors[1].shape[1] for part in parts] == [3, 3, 2, 2]
    assert [part.share for part in parts] == [part.weight for part in parts] == [0.3, 0.3, 0.2, 0.2]
    assert torch.equal(torch.cat([part.tensors[0] for part in parts]), x)
    assert all(part.tensors[2] is table for part in parts)


def test_samples_may_be_one_of_several_loops_of_a_dim() -> None:
    """Of 2 x 3 x 2 numbers samples are the 3 in the middle."""
    first, second = cut(torch.arange(12), Rows(0, outer=2, inner=2), [2, 1])
    assert first.tolist() == [0, 1, 2, 3, 6, 7, 8, 9] and second.tolist() == [4, 5, 10, 11]


@pytest.mark.parametrize("rows", [Rows(0), Rows(1), Rows(1, outer=2), Rows(1, outer=2, inner=2)], ids=str)
def test_parts_lie_in_memory_as_the_whole_and_gradients_pass(rows: Rows) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    parts = cut(x, rows, [1, 8 // (rows.outer * rows.inner) - 1])
    assert all(part.is_contiguous() for part in parts)
    sum((part * (place + 1)).sum() for place, part in enumerate(parts)).backward()  # type: ignore[union-attr]
    assert x.grad is not None and sorted(set(x.grad.flatten().tolist())) == [1.0, 2.0]


def test_one_part_is_the_batch() -> None:
    (part,) = split_batch(TEN, [torch.ones(10)], 1)
    assert part.share == part.weight == 1.0 and len(part.tensors[0]) == 10


def test_batches_that_are_too_short_are_refused() -> None:
    with pytest.raises(InputError, match="11 for a batch of 10, wanted at most 10"):
        split_batch(TEN, [torch.ones(10)], 11)
    with pytest.raises(InputError, match="found 0, wanted at least 1"):
        split_batch(TEN, [torch.ones(10)], 0)
    with pytest.raises(InputError, match="no samples"):
        split_batch(TEN, [torch.ones(0, 3)], 1)


def count(dtype: torch.dtype, *, multiplies: bool = False) -> Count:
    """The sum of the call's second tensor, times a constant, a cast and a buffer in between."""
    return Count(
        operators=(
            Operator("cast", aten.to.dtype, (Ref("y"), dtype), {}, ("cast",)),
            Operator("twice", aten.mul.Tensor, (Ref("cast"), Ref("two")), {}, ("twice",)),
            Operator("held", aten.mul.Tensor, (Ref("twice"), Ref("buffer")), {}, ("held",)),
            Operator("sum", aten.sum.default, (Ref("held"),), {}, ("sum",)),
        ),
        inputs=(("y", 1),),
        buffers=(("buffer", "norm.scale"),),
        constants={"two": torch.tensor(2.0)},
        result="sum",
        multiplies=multiplies,
    )


def test_a_count_is_of_the_whole_batch_whatever_the_part() -> None:
    x, y = torch.ones(4, 2), torch.tensor([1, 0, 0, 1])
    for multiplies, weight in ((False, 1 / 12), (True, 12.0)):
        counted = count(torch.float32, multiplies=multiplies)
        cutting = Cutting((Rows(0), Rows(0)), 4, by_share=False, count=counted)
        parts = split_batch(cutting, [x, y], 2, find={"norm.scale": torch.tensor(3.0)}.__getitem__)
        assert [part.weight for part in parts] == [weight, weight]
        assert [part.weight for part in split_batch(cutting, [x, y], 2, weigh=False)] == [1.0, 1.0]


def test_counts_are_not_rounded_to_the_models_precision() -> None:
    """In bfloat16 257 ones are 256."""
    ones = torch.ones(257, dtype=torch.bfloat16)

    def held(name: str) -> Tensor:
        return torch.tensor(1.0)

    assert number_of(count(torch.bfloat16), [ones, ones], held) == 514


def test_every_micro_batch_of_every_step_has_masks_of_its_own() -> None:
    assert len({mask_seed(step, number) for step in range(100) for number in range(64)}) == 6400
