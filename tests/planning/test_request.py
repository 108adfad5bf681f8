"""Which schedules a request leaves to the search."""

from __future__ import annotations

import pytest

from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.planning import request as request_module
from autopar.planning.request import Request

GPIPE, ONE_F_ONE_B, ZB1P = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB1P


def test_all_schedules_that_can_be_run_are_tried_or_the_one_that_is_asked_for() -> None:
    assert set(Request(pipeline_ranks=2, micro_batches=4, schedule=None).kinds()) == set(ScheduleKind)
    single = Request(pipeline_ranks=2, micro_batches=1, schedule=None).kinds()
    assert GPIPE in single and ONE_F_ONE_B not in single  # which has to be filled
    assert Request(pipeline_ranks=2, micro_batches=4, schedule=ZB1P).kinds() == [ZB1P]
    assert Request(pipeline_ranks=1, micro_batches=4).kinds() == []
    assert Request(pipeline_ranks=2, micro_batches=4, relay=True).kinds() == []
    with pytest.raises(InputError):
        Request(pipeline_ranks=2, micro_batches=1, schedule=ONE_F_ONE_B).kinds()


def test_of_schedules_too_long_to_time_the_shortest_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Request(pipeline_ranks=3, micro_batches=6, schedule=None)
    plain, virtual = 2 * 3 * 6, 2 * 3 * 2 * 6
    assert asked.actions(ONE_F_ONE_B) == plain and asked.actions(ScheduleKind.ZBV) == virtual
    monkeypatch.setattr(request_module, "MOST_ACTIONS", plain)
    assert set(asked.kinds()) == {GPIPE, ONE_F_ONE_B, ZB1P}
    monkeypatch.setattr(request_module, "MOST_ACTIONS", plain - 1)
    (kind,) = asked.kinds()
    assert asked.actions(kind) == plain and kind is not GPIPE
