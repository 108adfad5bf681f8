"""A rank lets go of what it sent when a message shows that it has arrived, not before and not later."""

from __future__ import annotations

from hypothesis import given, settings

from autopar.core.schedule import Action, Overlap, Schedule, ScheduleKind, Slot
from autopar.core.timeline import StageCost
from autopar.schedules.deliveries import Message, leaves, needed_by, proved, sent_by
from autopar.schedules.orders import build_schedule
from autopar.schedules.simulate import simulate
from tests.schedules.random_schedules import schedules


def actions(slot: Slot) -> tuple[Action, ...]:
    return (slot.forward, slot.backward) if isinstance(slot, Overlap) else (slot,)


def places(schedule: Schedule) -> tuple[dict[Message, int], dict[Message, int]]:
    """After which slot of its sender's a message leaves, and at which of its taker's it is taken."""
    sent, taken = {}, {}
    for order in schedule.orders:
        for place, slot in enumerate(order):
            for action in actions(slot):
                if (message := sent_by(action)) and leaves(schedule, message):
                    sent[message] = place
                if message := needed_by(action):
                    taken[message] = place
    return sent, taken


def test_a_forward_is_proved_by_its_gradient_and_a_gradient_by_the_next_forward() -> None:
    schedule = build_schedule(ScheduleKind.ZB1P, ranks=2, micro_batches=4)
    #  0F0 0F1 0I0 0W0 0F2 0I1 ...      1F0 1I0 1F1 1I1 1W0 ...
    first, second = proved(schedule, 0), proved(schedule, 1)
    assert first[Message(1, False, 0)] == (Message(0, True, 0),)
    assert Message(1, True, 1) not in second  # rank 0 sent it before it took the gradient of 0
    assert second[Message(0, True, 2)] == (Message(1, False, 0),)


def test_a_v_knows_by_what_comes_down_and_up() -> None:
    schedule = build_schedule(ScheduleKind.ZBV, ranks=2, stages_per_rank=2, micro_batches=4)
    known = {message for rank in range(2) for each in proved(schedule, rank).values() for message in each}
    assert {(message.stage, message.forward) for message in known} == {
        (0, True),
        (1, False),
        (2, True),
        (3, False),
    }


@given(schedules())
@settings(max_examples=60)
def test_what_proves_left_after_what_is_proved_was_taken(schedule: Schedule) -> None:
    sent, taken = places(schedule)
    for rank in range(schedule.ranks):
        known: set[Message] = set()
        for slot in schedule.orders[rank]:
            for message in filter(None, map(needed_by, actions(slot))):
                if message not in sent or schedule.rank_of(message.taker) != rank:
                    continue
                peer = schedule.rank_of(message.stage)
                could = {
                    mine
                    for mine, place in taken.items()
                    if mine in sent
                    and schedule.rank_of(mine.stage) == rank
                    and schedule.rank_of(mine.taker) == peer
                    and place <= sent[message]
                }
                assert set(proved(schedule, rank).get(message, ())) == could - known
                known |= could


@given(schedules())
@settings(max_examples=60)
def test_memory_of_gradients_that_were_sent_ends_with_the_proof(schedule: Schedule) -> None:
    """Simulated bytes never exceed what was sent, and what nothing proves is there at the end."""
    timeline = simulate(schedule, [StageCost(1, 1, 1, sent_back=1)] * schedule.stages)
    for rank, held in enumerate(timeline.held):
        gradients = {
            message
            for slot in schedule.orders[rank]
            for action in actions(slot)
            if (message := sent_by(action)) and not message.forward and leaves(schedule, message)
        }
        known = {message for each in proved(schedule, rank).values() for message in each}
        assert held[-1].nbytes == len(gradients - known)
        assert 0 <= min(each.nbytes for each in held) <= max(each.nbytes for each in held) <= len(gradients)
