"""The profiler: it times forward and backward each on its own, and every operator's operands are valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.core.graph import Call, TensorSpec
from autopar.errors import CostMissingError
from costdb import timing
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


class Products(TorchDispatchMode):
    """A clock that counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += func is ATEN.mm.default
        return func(*args, **(kwargs or {}))

    def perf_counter(self) -> float:
        return float(self.count)

    thread_time = perf_counter


def test_a_product_is_timed_forward_and_its_two_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec((8, 8), torch.float32, requires_grad=True)
    with Products() as products:
        monkeypatch.setattr(timing, "time", products)
        measurement = measure(Call(ATEN.mm.default, (spec, spec), {}), budget=30)
    assert (measurement.forward_seconds, measurement.backward_seconds) == (1, 2)


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
