"""Which schedules a request leaves to the search."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cluster import ClusterSpec
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.planning.asked import request as request_module
from autopar.planning.asked.options import PLAN, Options
from autopar.planning.asked.request import Request, request_of

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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            {"mesh": "3"},
            "--mesh 3: found 3 devices, wanted the 4 of the cluster; write --mesh 4, --mesh 2x2, or leave",
        ),
        ({"mesh": "8"}, "wanted the 4 of the cluster"),
        ({"mesh": "4", "stages": 2}, "wanted the 2 of each of 2 stages; write --mesh 2, or leave it out"),
        ({"mesh": "2", "stages": 4}, "wanted the 1 of each of 4 stages; write --mesh 1"),
    ],
)
def test_a_mesh_of_other_devices_is_refused_with_those_that_fit(words: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        request_of(Options(PLAN, **words), ClusterSpec.local(4))
    assert request_of(Options(PLAN, mesh="2", micro_batches=2), ClusterSpec.local(4))[0].pipeline_ranks == 2


def test_of_schedules_too_long_to_time_the_shortest_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Request(pipeline_ranks=3, micro_batches=6, schedule=None)
    plain, virtual = 2 * 3 * 6, 2 * 3 * 2 * 6
    assert asked.actions(ONE_F_ONE_B) == plain and asked.actions(ScheduleKind.ZBV) == virtual
    monkeypatch.setattr(request_module, "MOST_DEFAULT_ACTIONS", plain)
    assert set(asked.kinds()) == {GPIPE, ONE_F_ONE_B, ZB1P}
    monkeypatch.setattr(request_module, "MOST_DEFAULT_ACTIONS", plain - 1)
    (kind,) = asked.kinds()
    assert asked.actions(kind) == plain and kind is not GPIPE
