"""The profiler: its times are those of a hand timing, and every operator's operands are valid."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from autopar.core.graph import Call, TensorSpec
from autopar.errors import CostMissingError
from costdb.footprint import footprint
from costdb.profiler import measure
from tests.costdb.test_footprint import CASES

ATEN = torch.ops.aten


@pytest.mark.parametrize("name", CASES)
def test_every_call_is_measured(name: str) -> None:
    call, _ = CASES[name]
    measurement = measure(call, budget=0.005)
    assert measurement.forward_seconds > 0 and measurement.backward_seconds > 0
    assert measurement.saved == footprint(call).saved
    assert measurement.scratch_bytes is None, "CPUs have no counter"
    assert measurement.runs >= 3


def _median_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def test_a_large_product_takes_what_a_hand_timing_says(one_thread: None) -> None:
    spec = TensorSpec((512, 512), torch.float32, requires_grad=True)
    a, b = torch.rand(512, 512), torch.rand(512, 512)
    for _ in range(5):  # other work on the machine may disturb either side
        by_hand = _median_seconds(lambda: a @ b)
        measurement = measure(Call(ATEN.mm.default, (spec, spec), {}))
        forward = measurement.forward_seconds / by_hand
        backward = measurement.backward_seconds / by_hand / 2  # two products
        if 1 / 3 < forward < 3 and 1 / 3 < backward < 3:
            return
    pytest.fail(f"forward is {forward:.2f} times, backward {backward:.2f} times the hand timing")


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_without_a_gradient_there_is_no_backward() -> None:
    spec = TensorSpec((64, 64), torch.float32)
    assert measure(Call(ATEN.relu.default, (spec,), {}), budget=0.005).backward_seconds == 0


def test_measuring_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    measure(CASES["dropout"][0], budget=0.005)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_call_that_cannot_run_is_named() -> None:
    a, b = TensorSpec((2, 3), torch.float32), TensorSpec((2, 3), torch.float32)
    with pytest.raises(CostMissingError, match="aten.mm.default"):
        measure(Call(ATEN.mm.default, (a, b), {}))


def test_a_creator_runs_on_the_measured_device() -> None:
    call = Call(ATEN.arange.default, (5,), {"dtype": torch.int64, "device": torch.device("cuda")})
    assert measure(call, budget=0.005).forward_seconds > 0
