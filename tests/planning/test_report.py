"""Seconds of a report by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from autopar.core.timeline import StageCost
from autopar.cost.program.step import StepCost
from autopar.planning.asked.request import Request
from autopar.planning.report import _bubble, _communication
from autopar.solve.stages.step import Step

COST = StepCost(forward=4.0, backward=9.0, sync=5.0, update=1.0)
STAGES = (
    StageCost(1.0, 2.0, 1.5, send_output=0.25, send_gradient=0.0, sync=2.0, update=0.5),
    StageCost(3.0, 2.5, 2.0, send_output=0.0, send_gradient=0.5, sync=3.0, update=0.25),
)


def step(*stages: StageCost, seconds: float = 0.0) -> Step:
    cut = SimpleNamespace(stages=stages) if stages else None
    return cast(Step, SimpleNamespace(cost=COST, cut=cut, seconds=seconds))


def test_without_stages_what_is_not_computed_is_communicated_and_gradients_are_summed_once() -> None:
    assert _communication(step(), 11.0, Request(micro_batches=3)) == 3 * (4 + 9 - 11) + 5
    assert _communication(step(), 20.0, Request(micro_batches=3)) == 5  # never less than nothing
    assert _bubble(step(), Request(micro_batches=3)) == 0


def test_with_stages_hops_and_sums_of_all_are_shared_by_the_ranks() -> None:
    request = Request(pipeline_ranks=2, micro_batches=4)
    hops, sums = 0.25 + 0.5, 2 + 3
    assert _communication(step(*STAGES), 11.0, request) == (4 * ((4 + 9 - 11) + hops) + sums) / 2


def test_the_bubble_is_what_stages_and_updates_leave_of_the_step() -> None:
    request = Request(pipeline_ranks=2, micro_batches=4)
    work = 4 * ((1 + 2 + 1.5) + (3 + 2.5 + 2)) + (0.5 + 0.25)
    assert _bubble(step(*STAGES, seconds=40.0), request) == pytest.approx(1 - work / (2 * 40))
    assert _bubble(step(*STAGES, seconds=1.0), request) == 0
