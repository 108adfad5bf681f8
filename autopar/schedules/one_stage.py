"""A step without stages in time: the moments of every micro-batch, one after the other, and what ends it.

computes   F0 F0 F0 B0 B0 B0 F1 F1 F1 B1 B1 B1     u         F0 is one for each operator
sums                                     ssssssssss          those that hide begin before the end of B1

All devices do the same, so there is one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.core.schedule import Action, ActionKind, Schedule, ScheduleKind
from autopar.core.timeline import Event, EventKind, HeldBytes, Moment, Phase, RankActivity, Timeline

KINDS: Mapping[Phase, EventKind] = {
    Phase.FORWARD: ActionKind.FORWARD,
    Phase.RECOMPUTE: RankActivity.RECOMPUTE,
    Phase.BACKWARD: ActionKind.BACKWARD,
    Phase.COPIES: RankActivity.COPIES,
    Phase.SUMS: RankActivity.SYNC,
    Phase.OPTIMIZER: RankActivity.UPDATE,
}


def one_stage(moments: Sequence[Moment], micro_batches: int, *, names: Sequence[str]) -> Timeline:
    """The timeline of a step on a device that holds all of the model; `names` are those of its operators."""
    events, held = list[Event](), list[HeldBytes]()
    now = 0.0
    for number, moment in _in_order(moments, micro_batches):
        early = min(moment.hidden, now)
        stop = now + moment.seconds
        if early or moment.seconds:
            label = "" if moment.layer is None else f"{names[moment.layer]} {moment.phase.value}"
            events.append(Event(0, 0, number, KINDS[moment.phase], now - early, stop, label=label))
        held.append(HeldBytes(now, moment.nbytes))
        now = stop
    events.sort(key=lambda event: (event.start, event.stop))
    order = tuple(
        Action(0, kind, number)
        for number in range(micro_batches)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    )
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, 1, 1, micro_batches, (order,))
    return Timeline(schedule, tuple(events), (tuple(held) or (HeldBytes(0.0, 0),),))


def _in_order(moments: Sequence[Moment], micro_batches: int) -> Iterator[tuple[int | None, Moment]]:
    """Every moment with its micro-batch, none for what comes once."""
    repeated = [moment for moment in moments if not moment.phase.is_once]
    for number in range(micro_batches):
        yield from ((number, moment) for moment in repeated)
    yield from ((None, moment) for moment in moments if moment.phase.is_once)
