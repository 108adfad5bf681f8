"""The parts of a step add up to it, and each is what its name says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.api import plan
from autopar.cluster import ClusterSpec, Link
from autopar.core.schedule import ActionKind, Schedule, ScheduleKind
from autopar.core.timeline import Event, RankActivity, StageCost, Timeline
from autopar.planning.apart import IN_VAIN
from autopar.planning.step_parts import joined, length, staged_parts, without
from autopar.results.plan.plan import Plan
from autopar.results.plan.step_parts import StepParts
from autopar.schedules.orders import build_schedule
from autopar.schedules.simulate import simulate
from tests.results.files.test_codec import Net, X

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def planned(bandwidth: float = 1e9, **options: Any) -> Plan:
    slow = ClusterSpec(devices_per_node=4, device="h100", intra=Link(latency=1e-6, bandwidth=bandwidth))
    return plan(Net(), slow, X, measure=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1, "micro_batches": 1},
        {"stages": 1, "micro_batches": 1, "force": "filter"},
        {"stages": 1, "micro_batches": 4},
        {"stages": 1, "micro_batches": 1, "recompute": "all"},
        {"stages": 1, "micro_batches": 2, "shard_state": "weights"},
        *({"stages": 2, "micro_batches": 4, "schedule": kind} for kind in ("gpipe", "interleaved", "zbv")),
        {"stages": 4, "micro_batches": 8, "schedule": "1f1b", "recompute": "all"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_parts_add_up_to_the_step(options: dict[str, Any]) -> None:
    found = planned(**options)
    assert found.parts.total == pytest.approx(found.step_seconds, rel=1e-9)
    assert min(found.parts.as_dict().values()) >= 0
    assert found.parts.compute == pytest.approx(found.compute_seconds, rel=1e-6)
    waits_for_host = any("the host is the limit" in note for note in found.notes)
    assert bool(found.parts.waits) == (found.pipeline.is_staged or waits_for_host)
    for item in found.alternatives:
        if item.step_seconds is not None and "stages" not in item.name and IN_VAIN not in item.reason:
            assert item.parts.total == pytest.approx(item.step_seconds, rel=1e-9), item.name


def test_communication_and_sums_are_those_of_the_layers() -> None:
    found = planned(stages=1, micro_batches=1, force="filter")
    own = sum(layer.communication for layer in found.layers)
    assert found.parts.communication > 0
    assert found.parts.communication + found.parts.sums == pytest.approx(own)
    batch = planned(1e8, stages=1, micro_batches=1, force="batch")
    parts, own = batch.parts, sum(layer.communication for layer in batch.layers)
    assert parts.communication + parts.sums + parts.hidden == pytest.approx(own)
    assert parts.sums > 0 and parts.hidden > 0 and parts.hops == parts.recompute == 0


def test_recomputing_has_a_part_of_its_own() -> None:
    asked: dict[str, Any] = {"stages": 1, "micro_batches": 1, "force": "batch"}
    plain, again = (planned(**asked, recompute=each) for each in ("none", "all"))
    assert plain.parts.recompute == 0 < again.parts.recompute
    without_host, again_without = (each.step_seconds - each.parts.waits for each in (plain, again))
    assert again_without == pytest.approx(without_host + again.parts.recompute)


def test_waits_are_told_apart_by_hand() -> None:
    """Rank 0 computes [0, 4) and [9, 11), sends in [4, 6); its sums last from 11 to 14, the update to 15.
    Rank 1 computes [6, 9) and [10, 12); what it sends back is under way while rank 0 computes."""
    schedule = build_schedule(ScheduleKind.GPIPE, ranks=2, stages_per_rank=1, micro_batches=1)
    events = (
        Event(0, 0, 0, F, 0.0, 4.0),
        Event(0, 0, 0, RankActivity.SEND, 4.0, 6.0, 1),
        Event(1, 1, 0, F, 6.0, 9.0),
        Event(1, 1, 0, RankActivity.SEND, 9.0, 10.0, 0),
        Event(0, 0, 0, B, 9.0, 11.0),
        Event(1, 1, 0, B, 10.0, 12.0),
        Event(0, 0, None, RankActivity.SYNC, 11.0, 14.0),
        Event(0, 0, None, RankActivity.UPDATE, 14.0, 15.0),
    )
    parts = staged_parts(StepParts(compute=4.0), Timeline(schedule, events, ((), ())), 15.0)
    assert parts == StepParts(
        compute=4.0,
        communication=(4 + 2 + 3 + 2) / 2 - 4.0,  # of stages, what isn't computing
        hops=2 / 2,
        sums=3 / 2,
        optimizer=1 / 2,
        waits=(15 - 7 - 3) / 2 + (15 - 5 - 2) / 2,
        hidden=1 / 2,
    )
    assert parts.total == pytest.approx(15.0)


def test_gradient_sums_hide_behind_what_the_rank_still_computes() -> None:
    cost = StageCost(1.0, 1.0, 1.0, sync=2.0, update=0.5)
    kind = ScheduleKind.INTERLEAVED
    schedule: Schedule = build_schedule(kind, ranks=2, stages_per_rank=2, micro_batches=2)
    timeline = simulate(schedule, [cost] * 4)
    found = staged_parts(StepParts(compute=1.0), timeline, timeline.seconds)
    assert found.total == pytest.approx(timeline.seconds)
    assert found.sums + found.hidden == pytest.approx(2 * 2.0)  # both stages of a rank
    assert found.hidden > 0 and found.optimizer == 2 * 0.5
    alone = simulate(schedule, [replace(cost, sync=0.0)] * 4)
    assert timeline.seconds - alone.seconds <= found.sums + 1e-9


def test_spans() -> None:
    events = [Event(0, 0, 0, F, *each) for each in ((4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (6.0, 7.0))]
    spans = joined(events)
    assert spans == [(0.0, 3.0), (4.0, 7.0)] and length(spans) == 6
    assert without(spans, [(1.0, 2.0), (2.5, 5.0), (6.5, 9.0)]) == [(0.0, 1.0), (2.0, 2.5), (5.0, 6.5)]
    assert without(spans, []) == spans and without([], spans) == []
