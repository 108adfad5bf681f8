"""A step without stages in time, by numbers that are computed by hand."""

from __future__ import annotations

from expecttest import assert_expected_inline

from autopar.core.schedule import ActionKind
from autopar.core.timeline import Moment, Phase, RankActivity, Timeline
from autopar.results.plan.draw_timeline import perfetto, timeline_text
from autopar.schedules.one_stage import one_stage

MOMENTS = (
    Moment(Phase.FORWARD, 0, 1.0, 10),
    Moment(Phase.FORWARD, 1, 2.0, 30),
    Moment(Phase.RECOMPUTE, 0, 1.0, 35),
    Moment(Phase.BACKWARD, 1, 2.0, 40),
    Moment(Phase.BACKWARD, 0, 2.0, 20),
    Moment(Phase.COPIES, None, 0.5, 20),
    Moment(Phase.SUMS, None, 1.5, 25, hidden=0.5),
    Moment(Phase.OPTIMIZER, None, 1.0, 15),
)


def made(micro_batches: int = 2) -> Timeline:
    return one_stage(MOMENTS, micro_batches, names=["low", "high"])


def test_micro_batches_follow_each_other_and_hidden_sums_begin_before_the_last_ends() -> None:
    found = made()
    assert found.seconds == 2 * 8.5 + 1.5 + 1.0
    (sums,) = (event for event in found.events if event.kind is RankActivity.SYNC)
    assert (sums.start, sums.stop) == (16.5, 18.5)
    again = [event for event in found.events if event.kind is RankActivity.RECOMPUTE]
    assert [(event.micro_batch, event.start) for event in again] == [(0, 3.0), (1, 11.5)]
    assert found.busy_seconds(0) == 2 * 8.0 + 1.0
    assert (found.peak.nbytes, found.peak.seconds) == (40, 4.0)


def test_operators_are_named_and_joined_where_kinds_are_drawn() -> None:
    found = made(1)
    assert str(found.events[0]) == "low forward"
    names = {event["name"] for event in perfetto(found)["traceEvents"]}
    assert {"low forward", "high backward", "low recompute", "update 0"} <= names
    kinds = [event.kind for event in found.coarse.events if event.kind in ActionKind]
    assert kinds == [ActionKind.FORWARD, ActionKind.BACKWARD]
    assert found.coarse.coarse == found.coarse


def test_it_is_drawn_as_text() -> None:
    assert_expected_inline(
        timeline_text(made(), width=80).replace("   .", "\n."),
        """\
1f1b: ranks 1, stages 1, micro-batches 2, 19.5 s a step
0 ns to 19.5 s
rank 0  0----------0rrr0==============c1----------1rrr1==============sssssssuuuu
- forward   = backward   s waits for gradient sums   u update   r recomputes   c waits for copies
. waits
rank 0  waits 12.8%, holds at most 40 B, first at 4 s""",
    )
