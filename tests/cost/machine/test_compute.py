"""The roofline by hand, on a device that does 10 flop/s, moves 1 byte/s and launches in 1 s."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.core.costs import DeviceModel, OperatorCost, SavedByCall
from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine.compute import cost, estimate
from autopar.errors import CostMissingError, InputError
from costdb.measurement import Measurement

ATEN = torch.ops.aten
TOY = DeviceModel("toy", "cpu", ((torch.float32, 10.0),), bandwidth=1.0, launch_seconds=1.0)
FAST_MEMORY = DeviceModel("fast", "cpu", ((torch.float32, 10.0),), bandwidth=1e30, launch_seconds=0.0)


def x(*shape: int, requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype, requires_grad)


def call(target: Any, *args: Any) -> Call:
    return Call(target, args, {})


def seconds(subject: Call, device: DeviceModel = TOY) -> tuple[float, float]:
    found = estimate(subject, device)
    assert not found.measured
    return found.forward_seconds, found.backward_seconds


def test_a_product_is_bound_by_its_flops() -> None:
    # 2 * 5 * 7 * 3 = 210 flops forward, twice that backward
    assert seconds(call(ATEN.mm.default, x(5, 3), x(3, 7)), FAST_MEMORY) == (21.0, 42.0)


def test_a_frozen_weight_halves_the_backward() -> None:
    assert seconds(call(ATEN.mm.default, x(5, 3), x(3, 7, requires_grad=False)), FAST_MEMORY) == (21.0, 21.0)


def test_an_activation_is_bound_by_its_bytes() -> None:
    # 10 floats: reads 40 and writes 40 bytes; backward reads gradient and result, writes 40
    assert seconds(call(ATEN.relu.default, x(10))) == (1 + 80, 1 + 120)


def test_a_product_launches_a_kernel_for_each_gradient() -> None:
    # 4 + 4 + 4 bytes forward; backward reads gradient, x and w and writes two gradients
    assert seconds(call(ATEN.mm.default, x(1, 1), x(1, 1))) == (1 + 12, 2 + 20)


def test_a_view_only_launches() -> None:
    assert seconds(call(ATEN.view.default, x(2, 5), [10])) == (1.0, 1.0)


def test_the_gradient_of_a_slice_is_padded() -> None:
    # backward reads 2 floats and writes 10
    assert seconds(call(ATEN.slice.Tensor, x(10), 0, 0, 2)) == (1.0, 1 + 8 + 40)


def test_an_embedding_reads_only_the_rows_that_it_gives() -> None:
    labels = TensorSpec((2,), torch.int64)
    forward, backward = seconds(call(ATEN.embedding.default, x(100, 4), labels))
    assert forward == 1 + 32 + 16 + 32  # rows, labels, result
    assert backward == 1 + 32 + 16 + 1600  # gradient, labels, the table's dense gradient


def test_nothing_trained_has_no_backward() -> None:
    assert seconds(call(ATEN.relu.default, x(10, requires_grad=False))) == (81.0, 0.0)


def test_a_measurement_goes_before_the_estimate() -> None:
    subject = call(ATEN.relu.default, x(10))
    measured = Measurement(subject.key(), 5.0, 7.0, SavedByCall(), 0, None, runs=3, spread=0.0)
    assert cost(subject, TOY, {subject.key(): measured}) == OperatorCost(5.0, 7.0, measured=True)
    assert cost(subject, TOY, {}) == estimate(subject, TOY)


def test_a_product_of_an_unknown_dtype_is_refused_by_name() -> None:
    a = x(2, 2, dtype=torch.float64)
    with pytest.raises(CostMissingError, match="device toy.*torch.float64"):
        estimate(call(ATEN.mm.default, a, a), TOY)


RATES = {torch.float64: 5.0, torch.float32: 10.0, torch.bfloat16: 30.0}
RATED = DeviceModel("rated", "cpu", tuple(RATES.items()), bandwidth=1e30, launch_seconds=0.0)


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [*RATES.items(), (torch.complex64, 10.0), (torch.complex128, 5.0)],
    ids=str,
)
def test_a_product_runs_at_the_rate_of_its_dtype_and_a_complex_one_at_that_of_its_parts(
    dtype: torch.dtype, rate: float
) -> None:
    # 210 flops forward, 420 backward
    assert seconds(call(ATEN.mm.default, x(5, 3, dtype=dtype), x(3, 7, dtype=dtype)), RATED) == (
        210 / rate,
        420 / rate,
    )


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bfloat16, 2),
        (torch.float16, 2),
        (torch.float32, 4),
        (torch.float64, 8),
        (torch.complex64, 8),
        (torch.complex128, 16),
    ],
    ids=str,
)
def test_bytes_moved_are_those_of_the_dtype(dtype: torch.dtype, size: int) -> None:
    # 10 numbers and their exponentials; backward reads gradient and result, writes 10
    assert seconds(call(ATEN.exp.default, x(10, dtype=dtype))) == (1 + 20 * size, 1 + 30 * size)


def test_every_operand_counts_by_its_own_dtype() -> None:
    # where(mask, a, b): 10 bytes, 40 and 40 read, 40 written; backward reads gradient and mask, writes two
    mask = TensorSpec((10,), torch.bool)
    assert seconds(call(ATEN.where.self, mask, x(10), x(10))) == (1 + 130, 1 + 40 + 10 + 80)


def test_a_cast_reads_one_dtype_and_writes_the_other() -> None:
    # 10 floats to 10 doubles and the gradient back; nothing is kept
    assert seconds(call(ATEN.to.dtype, x(10), torch.float64)) == (1 + 40 + 80, 1 + 80 + 40)


def test_the_larger_of_flops_and_bytes_counts_and_not_their_sum() -> None:
    slow = DeviceModel("slow", "cpu", ((torch.float32, 1.0),), bandwidth=1.0, launch_seconds=1.0)
    # 210 flops against 4 x (15 + 21 + 35) = 284 bytes; backward 420 against 4 x (35 + 2 x 36) = 428
    assert seconds(call(ATEN.mm.default, x(5, 3), x(3, 7)), slow) == (1 + 284, 2 + 428)
    # at half the rate: 250 flops against 4 x 75 bytes; backward 500 against 4 x 125
    slower = DeviceModel("slower", "cpu", ((torch.float32, 0.5),), bandwidth=1.0, launch_seconds=1.0)
    assert seconds(call(ATEN.mm.default, x(5, 5), x(5, 5)), slower) == (1 + 500, 2 + 1000)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_bad_numbers_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match="forward"):
        OperatorCost(bad, 0.0, measured=False)
    with pytest.raises(InputError, match="bandwidth"):
        DeviceModel("toy", "cpu", ((torch.float32, 1.0),), bandwidth=bad, launch_seconds=0.0)
    with pytest.raises(InputError, match="float32"):
        DeviceModel("toy", "cpu", ((torch.float32, bad),), bandwidth=1.0, launch_seconds=0.0)


class Ran(TorchDispatchMode):
    """Every operator that runs, and whether on data."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.on_data: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and not leaf.is_meta:
                self.on_data.append(str(func))
        return results


def test_an_estimate_runs_its_operator_without_data_and_only_once() -> None:
    n = 127  # a length that no other test has
    calls = [
        call(ATEN.linear.default, x(n, 16, 32), x(64, 32), x(64)),
        call(ATEN.gelu.default, x(n, 16, 64)),
        call(ATEN.layer_norm.default, x(n, 16, 32), [32], x(32), x(32)),
        call(ATEN.add.Tensor, x(n, 16, 32), x(n, 16, 32)),
        call(ATEN.view.default, x(n, 16, 32), [n, 4, 128]),
        call(ATEN.softmax.int, x(n, 4, 16, 16), -1),
        call(ATEN.dropout.default, x(n, 16, 32), 0.1, True),
        call(ATEN.scaled_dot_product_attention.default, *[x(n, 4, 16, 8)] * 3),
    ]
    with Ran() as first:
        known = [estimate(subject, TOY) for subject in calls]
    assert first.names and not first.on_data
    with Ran() as second:
        again = [estimate(subject, TOY) for subject in calls]
    assert not second.names and all(map(operator.is_, again, known))
