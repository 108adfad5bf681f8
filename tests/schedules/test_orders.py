"""Schedules are torch's own, action by action, and drawn as they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import product

import pytest

from autopar.core.schedule import Action, ActionKind, Schedule, ScheduleKind, check_schedule, rank_of_stage
from autopar.errors import InputError
from autopar.schedules.orders import GENERATORS, build_schedule
from tests.schedules.schedule_drawing import drawing
from tests.schedules.torch_schedules import MULTI, SINGLE, Recorder, Shape, multi, single_programs


def shapes(kinds: Iterable[ScheduleKind]) -> Iterator[Shape]:
    """(kind, ranks, stages per rank, micro-batches), allowed or not."""
    yield from product(kinds, (1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3, 5, 6, 8, 9, 12, 14, 16))


def allowed(shape: Shape) -> bool:
    kind, ranks, stages, micro_batches = shape
    try:
        check_schedule(kind, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches)
    except InputError:
        return False
    return True


def ours(shape: Shape) -> Schedule:
    kind, ranks, stages, micro_batches = shape
    return build_schedule(kind, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches)


@pytest.mark.parametrize("kind", MULTI, ids=lambda kind: kind.value)
def test_orders_and_ranks_of_stages_are_torchs(kind: ScheduleKind) -> None:
    checked = 0
    for shape in filter(allowed, shapes([kind])):
        schedule = ours(shape)
        torch_schedule = multi(shape)
        for rank, order in enumerate(schedule.orders):  # without idle steps, which torch drops too
            assert list(map(str, order)) == [
                str(slot) for slot in torch_schedule.pipeline_order[rank] if slot
            ]
        ranks = {stage: schedule.rank_of(stage) for stage in range(schedule.stages)}
        assert ranks == torch_schedule.stage_index_to_group_rank
        checked += 1
    assert checked >= 30


@pytest.mark.parametrize("kind", SINGLE, ids=lambda kind: kind.value)
def test_orders_are_what_torch_executes(kind: ScheduleKind, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in filter(allowed, shapes([kind])):
        programs = single_programs(shape, monkeypatch)
        ran = [tuple(step for step in program if isinstance(step, Action)) for program in programs]
        assert tuple(ran) == ours(shape).orders, shape


def test_torch_refuses_what_is_refused_here() -> None:
    for shape in shapes(MULTI):
        if not allowed(shape):
            with pytest.raises(ValueError, match="require"):
                multi(shape)
    for ranks, micro_batches in product(range(1, 7), range(1, 8)):
        if not allowed((ScheduleKind.ONE_F_ONE_B, ranks, 1, micro_batches)):
            with pytest.raises(ValueError, match="greater than"):
                SINGLE[ScheduleKind.ONE_F_ONE_B](Recorder(0, ranks), micro_batches)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (ScheduleKind.GPIPE, (3, 1, 3)),
        (ScheduleKind.ONE_F_ONE_B, (3, 1, 4)),
        (ScheduleKind.INTERLEAVED, (2, 2, 2)),
        (ScheduleKind.ZB1P, (3, 1, 4)),
        (ScheduleKind.ZBV, (2, 2, 3)),
        (ScheduleKind.DUALPIPEV, (2, 2, 4)),
    ],
    ids=lambda value: getattr(value, "value", ""),
)
def test_each_generators_drawing_is_its_schedule(kind: ScheduleKind, shape: tuple[int, int, int]) -> None:
    assert drawing(ours((kind, *shape))) in (inspect.getdoc(GENERATORS[kind]) or "")


@pytest.mark.parametrize("kind", [ScheduleKind.ZB1P, ScheduleKind.ZBV, ScheduleKind.DUALPIPEV])
def test_the_first_stages_split_backward_lies_side_by_side(kind: ScheduleKind) -> None:
    """torch leaves the first stage's I empty and computes all in its W: that costs nothing."""
    for shape in filter(allowed, shapes([kind])):
        actions = list(ours(shape).actions(0))
        for action, then in zip(actions, [*actions[1:], None], strict=True):
            if action.stage == 0 and action.kind is ActionKind.INPUT_GRADIENT:
                assert then == Action(0, ActionKind.WEIGHT_GRADIENT, action.micro_batch), shape


def test_loop_and_v_are_the_drawn_ones() -> None:
    loop = [rank_of_stage(ScheduleKind.INTERLEAVED, stage, 4) for stage in range(8)]
    assert loop == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [rank_of_stage(ScheduleKind.ZBV, stage, 4) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
