"""Waits are filled with gradients of weights, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ALWAYS_SPLIT, Action, ActionKind, Schedule, ScheduleKind
from autopar.core.timeline import StageCost
from autopar.schedules.fill_bubbles import filled, order_of
from autopar.schedules.orders import build_schedule
from autopar.schedules.simulate import simulate
from tests.schedules.random_schedules import schedules

I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741
CLOSE = 1e-9
SECONDS = st.floats(0.1, 3.0)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> list[StageCost]:
    """Of stages that differ, with what a micro-batch keeps, and less of it between the halves."""
    found = []
    for _ in range(stages):
        kept = draw(st.integers(0, 9))
        found.append(
            StageCost(
                draw(SECONDS),
                draw(SECONDS),
                draw(SECONDS),
                send_output=draw(st.floats(0.0, 0.5)),
                send_gradient=draw(st.floats(0.0, 0.5)),
                kept=kept,
                kept_for_weight=draw(st.integers(0, kept)),
            )
        )
    return found


def others(schedule: Schedule, rank: int) -> list[Action]:
    return [action for action in schedule.actions(rank) if action.kind is not W]


def weights(schedule: Schedule, rank: int, stage: int) -> list[Action]:
    return [action for action in schedule.actions(rank) if action.kind is W and action.stage == stage]


@settings(max_examples=200)
@given(st.data())
def test_nothing_is_later_and_no_rank_keeps_more(data: st.DataObject) -> None:
    plain = data.draw(schedules())
    stages = data.draw(costs(plain.stages))
    found = filled(plain, stages)
    before, after = simulate(plain, stages), simulate(found, stages)
    ends = {(each.stage, each.micro_batch, each.kind): each.stop for each in before.events}
    assert after.seconds <= before.seconds * (1 + CLOSE)
    for event in after.events:
        if event.kind is not W:
            assert event.stop <= ends[event.stage, event.micro_batch, event.kind] * (1 + CLOSE)
    for rank in range(plain.ranks):
        assert others(found, rank) == others(plain, rank)
        assert after.peak_of(rank).nbytes <= before.peak_of(rank).nbytes
        for stage in range(plain.stages):
            assert weights(found, rank, stage) == weights(plain, rank, stage)


@settings(max_examples=100)
@given(st.data())
def test_the_first_stage_keeps_its_halves_together_where_they_were(data: st.DataObject) -> None:
    """Its first half is empty in torch, and its second half all of its backward."""
    plain = data.draw(schedules())
    found = filled(plain, data.draw(costs(plain.stages)))
    for schedule in (plain, found):
        order = list(schedule.actions(0))
        for place, action in enumerate(order):
            if action.stage == 0 and action.kind is I and plain.kind in ALWAYS_SPLIT:
                assert order[place + 1] == Action(0, W, action.micro_batch)


@pytest.mark.parametrize("kind", ALWAYS_SPLIT)
def test_even_stages_leave_the_order_as_it_is(kind: ScheduleKind) -> None:
    v = 1 if kind is ScheduleKind.ZB1P else 2
    plain = build_schedule(kind, ranks=4, stages_per_rank=v, micro_batches=16)
    even = [StageCost(1.0, 1.0, 1.0)] * plain.stages
    assert simulate(filled(plain, even), even).seconds == simulate(plain, even).seconds


def test_a_longer_first_stage_leaves_waits_that_are_filled() -> None:
    plain = build_schedule(ScheduleKind.ZBV, ranks=4, stages_per_rank=2, micro_batches=16)
    uneven = [StageCost(1.0, 1.0, 1.0)] * 7 + [StageCost(1.3, 1.3, 1.3)]
    before, after = simulate(plain, uneven).seconds, simulate(filled(plain, uneven), uneven).seconds
    assert after == pytest.approx(16 * (3.0 + 3.9)), "its rank never waits"
    assert before > 1.01 * after


@pytest.mark.parametrize("kind", [kind for kind in ScheduleKind if kind not in ALWAYS_SPLIT])
def test_other_schedules_stay(kind: ScheduleKind) -> None:
    v = 2 if kind.is_v else 1
    plain = build_schedule(kind, ranks=2, stages_per_rank=v, micro_batches=4)
    assert filled(plain, [StageCost(1.0, 2.0, 3.0), StageCost(3.0, 2.0, 1.0)] * v) is plain


def test_a_plan_says_for_which_costs_its_waits_are_filled() -> None:
    uneven = (*[StageCost(1.0, 1.0, 1.0)] * 7, StageCost(1.3, 1.3, 1.3))
    pipeline = Pipeline(4, 16, ScheduleKind.ZBV, tuple(range(8)))
    plain = build_schedule(ScheduleKind.ZBV, ranks=4, stages_per_rank=2, micro_batches=16)
    assert order_of(pipeline) == plain
    assert order_of(replace(pipeline, filling=uneven)) == filled(plain, uneven) != plain
