"""Schedules: the rules on their numbers, and orders in which all work is done once."""

from __future__ import annotations

import pytest

from autopar.core.schedule import (
    Action,
    ActionKind,
    Overlap,
    Schedule,
    ScheduleKind,
    check_schedule,
)
from autopar.errors import CheckError, InputError

K = ScheduleKind


def action(text: str) -> Action:
    """`2F0` as an action; stages and micro-batches of one digit."""
    return Action(int(text[0]), ActionKind(text[1]), int(text[2]))


def schedule(*orders: str, micro_batches: int = 1) -> Schedule:
    """A schedule of one stage per rank with the orders as they are written."""
    slots = tuple(tuple(map(action, order.split())) for order in orders)
    return Schedule(K.GPIPE, len(orders), 1, micro_batches, slots)


@pytest.mark.parametrize(
    ("kind", "numbers", "message"),
    [
        (
            K.ONE_F_ONE_B,
            (4, 1, 3),
            "schedule 1f1b on 4 ranks: found 3 micro-batches, wanted at least 4 micro-batches; "
            "use as many as stages; gpipe takes fewer",
        ),
        (
            K.GPIPE,
            (4, 2, 3),
            "schedule gpipe on 4 ranks: found 2 stages per rank, wanted 1 stage per rank; "
            "take interleaved or zb1p for several stages per rank",
        ),
        (
            K.INTERLEAVED,
            (4, 2, 9),
            "schedule interleaved on 4 ranks: found 9 micro-batches, "
            "wanted a multiple of the 2 rounds that 9 // 4 gives; use 8 micro-batches, or any multiple of 4",
        ),
        (
            K.ZBV,
            (2, 1, 4),
            "schedule zbv on 2 ranks: found 1 stage per rank, wanted exactly 2 stages per rank; "
            "cut the model into twice as many stages as ranks",
        ),
        (
            K.DUALPIPEV,
            (2, 3, 1),
            "schedule dualpipev on 2 ranks: found 3 stages per rank, 1 micro-batch, "
            "wanted exactly 2 stages per rank, at least 4 micro-batches; cut the model into twice as many "
            "stages as ranks; use twice as many as ranks; zbv takes fewer",
        ),
        (
            K.ZB1P,
            (1, 0, -1),
            "schedule zb1p on 1 rank: found 0 stages per rank, -1 micro-batches, wanted at least 1 of each; "
            "give whole numbers from 1",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_remedy(
    kind: ScheduleKind, numbers: tuple[int, int, int], message: str
) -> None:
    ranks, stages, micro_batches = numbers
    with pytest.raises(InputError) as caught:
        check_schedule(kind, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches)
    assert str(caught.value) == message


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 9), (3, 7), (4, 11), (2, 7), (6, 13)])
def test_the_remedy_for_rounds_is_a_remedy(ranks: int, micro_batches: int) -> None:
    with pytest.raises(InputError) as caught:
        check_schedule(K.ZB1P, ranks=ranks, stages_per_rank=2, micro_batches=micro_batches)
    use = int(caught.value.remedy.split()[1])
    assert use < micro_batches
    for number in (use, ranks, 5 * ranks):
        check_schedule(K.ZB1P, ranks=ranks, stages_per_rank=2, micro_batches=number)


def test_a_schedule_reads_as_torch_writes_it() -> None:
    assert str(schedule("0F0 0B0", "1F0 1I0 1W0")) == "rank 0  0F0 0B0\nrank 1  1F0 1I0 1W0"
    assert str(Overlap(action("0F3"), action("3B1"))) == "(0F3;3B1)OVERLAP_F_B"


@pytest.mark.parametrize(
    ("orders", "fault"),
    [
        (("0F0 0B0", "1F0 1B0 1F0"), "rank 1 1F0 too often"),
        (("0F0 0B0", "1F0 1I0"), "rank 1 no 1W0"),
        (("0F0 0B0", "1F0 1B0 1W0"), "rank 1 1W0 too often"),
        (("0F0 0B0 1F0", "1B0"), "rank 0 1F0 too often"),
        (("0F0 0B1", "1F0 1B0"), "no 0I0, no 0W0"),
    ],
)
def test_work_left_out_or_done_twice_is_refused(orders: tuple[str, ...], fault: str) -> None:
    with pytest.raises(CheckError, match=fault):
        schedule(*orders)


def test_an_order_for_every_rank() -> None:
    with pytest.raises(CheckError, match="found 1 orders, wanted one for each of 2 ranks"):
        Schedule(K.GPIPE, 2, 1, 1, ((action("0F0"), action("0B0")),))
