"""A step takes at least as long as the host of its GPU takes to call its operators, and the plan says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import plan
from autopar.cluster import ClusterSpec
from autopar.cost.program.host import BACKWARD_CALL_SECONDS, FORWARD_CALL_SECONDS
from autopar.results.plan.plan import Plan


class Small(nn.Module):
    """Four operators: two products, a rectifier and a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).sum()


CALLS = 4 * (FORWARD_CALL_SECONDS + BACKWARD_CALL_SECONDS)


def planned(width: int = 8, samples: int = 8, device: str = "h100", **options: Any) -> Plan:
    asked: Any = {"stages": 1, "micro_batches": 1, "measure": False} | options
    cluster = ClusterSpec(devices_per_node=1, device=device)
    with torch.device("meta"):
        return plan(Small(width), cluster, torch.empty(samples, width), **asked)


def is_told(found: Plan) -> bool:
    return any("the host is the limit: to call 4 operators" in note for note in found.notes)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_step_of_small_operators_takes_their_calls(micro_batches: int) -> None:
    found = planned(micro_batches=micro_batches)
    assert found.step_seconds == pytest.approx(micro_batches * CALLS)
    assert found.parts.total == pytest.approx(found.step_seconds) and found.parts.waits > 0
    assert found.gap == 0 and is_told(found)


def test_a_step_of_large_operators_takes_their_kernels() -> None:
    found = planned(4096, 4096)
    assert found.step_seconds > CALLS and not is_told(found) and not found.parts.waits


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"compile": True}], ids=["cpu", "compiled"])
def test_calls_count_on_the_host_of_a_gpu_alone_and_not_in_compiled_programs(options: dict[str, Any]) -> None:
    found = planned(**options)
    assert not is_told(found) and not found.parts.waits
