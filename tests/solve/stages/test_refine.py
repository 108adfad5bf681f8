"""What makes a step with stages faster in the end, on a GPT for paper GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.schedule import ScheduleKind
from autopar.cost.program import host
from autopar.results.plan.plan import Plan
from autopar.solve.stages.refine import Refinement
from autopar.solve.stages.step import Step
from examples.characters import gpt

CLUSTER = ClusterSpec(
    nodes=2, devices_per_node=4, device="h100", memory="80GB", intra=Link(2e-6, 450e9), inter=Link(5e-6, 50e9)
)


def planned(schedule: ScheduleKind, **options: Any) -> Plan:
    torch.manual_seed(0)
    tokens = torch.randint(0, 65, (16, 64))
    return autopar.plan(
        gpt(6, 64, 4, vocabulary=65, sequence=64),
        CLUSTER,
        (tokens, tokens),
        stages=2,
        micro_batches=4,
        schedule=schedule.value,
        mesh="2x2",
        recompute="none",
        **options,
    )


def kinds_of_blocks(plan: Plan) -> set[tuple[Any, ...]]:
    """How the operators of a block run, for all of them that differ."""
    blocks: dict[str, list[Any]] = {}
    for layer in plan.layers:
        if layer.module.startswith("blocks."):
            blocks.setdefault(layer.module.split(".")[1], []).append(layer.strategy)
    return {tuple(block) for block in blocks.values()}


@pytest.mark.parametrize(
    ("schedule", "part"),
    [(ScheduleKind.ZB1P, 0.95), (ScheduleKind.ONE_F_ONE_B, 0.75)],
)
@pytest.mark.long
def test_where_memory_is_left_operators_follow_faster_placements(
    monkeypatch: pytest.MonkeyPatch, schedule: ScheduleKind, part: float
) -> None:
    cap = int(part * planned(schedule).peak_bytes)
    found = planned(schedule, memory=cap)
    with monkeypatch.context() as patch:
        patch.setattr(Refinement, "mixed", lambda *_: None)
        alike = planned(schedule, memory=cap)
    assert found.peak_bytes <= cap and alike.peak_bytes <= cap
    assert found.step_seconds < alike.step_seconds * (1 - 1e-3)
    assert len(kinds_of_blocks(alike)) == 1 < len(kinds_of_blocks(found))


@pytest.mark.slow
def test_waits_are_filled_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On hosts that call operators in no time: else these narrow nets wait for theirs."""
    monkeypatch.setattr(host, "FORWARD_CALL_SECONDS", 0.0)
    monkeypatch.setattr(host, "BACKWARD_CALL_SECONDS", 0.0)
    found = planned(ScheduleKind.ZBV)
    before: list[float] = []

    def plain(_: Refinement, step: Step) -> Step:
        before.append(step.seconds)
        return step

    with monkeypatch.context() as patch:
        patch.setattr(Refinement, "filled", plain)
        other = planned(ScheduleKind.ZBV)
    assert before and found.step_seconds <= other.step_seconds
    assert autopar.timeline(found).seconds == pytest.approx(found.step_seconds)
    assert bool(found.pipeline.filling) == (found.step_seconds < other.step_seconds)
