"""Predicted peaks are those of real training steps, of all tensors of the fullest rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.benchmarks.memory import Case, cases, compare
from tests.pool import Pool

WITHIN = 0.1  # of what is measured
HEAVY = {"mesh": "2", "force": "batch", "stages": 2, "micro_batches": 4}
SMALL = (
    Case("tiny", 2, {"mesh": "2", "force": "batch", "recompute": "all"}),
    Case("tiny", 2, {"stages": 2, "micro_batches": 2}, "sgd-momentum"),
    Case("graph_net", 2, {"mesh": "2"}, "sgd"),
    Case("bent_messages", 2, {"mesh": "2"}, "sgd"),
    Case("tiny", 2, {"stages": 2, "micro_batches": 4, "schedule": "zb1p", "recompute": "all"}),
    Case("heavy", 4, HEAVY | {"schedule": "1f1b"}, "sgd"),
    Case("heavy", 4, HEAVY | {"schedule": "zbv"}, "sgd"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*SMALL, *(pytest.param(case, marks=pytest.mark.long) for case in cases())],
    ids=lambda case: case.name,
)
def test_the_predicted_peak_is_the_measured_one(case: Case, pools: Callable[[int], Pool]) -> None:
    found = compare(case, pools(case.processes))
    assert found.predicted == pytest.approx(found.storages, rel=WITHIN)


@pytest.mark.slow
# What backward begins with is held by who calls it: of a loss some bytes, of outputs as much as these.
@pytest.mark.parametrize(
    "case",
    [
        Case("tiny", 2, {"mesh": "2", "force": "batch"}),
        Case("tiny", 2, {"mesh": "2", "force": "filter"}, "sgd"),
        Case("small_unet", 4, {"mesh": "4", "force": "domain"}, "sgd"),
    ],
    ids=lambda case: case.name,
)
def test_a_plan_of_one_stage_keeps_to_its_peak(case: Case, pools: Callable[[int], Pool]) -> None:
    found = compare(case, pools(case.processes))
    assert found.storages <= found.predicted
