"""When a rank knows that what it sent has arrived: by what came back since.

    rank 0   0F0 --.   0F1 --.      .--> 0B0       rank 1 took 0F0 before it sent 1B0, so with 1B0
    rank 1          '-> 1F0   1B0 -'               rank 0 knows that 0F0 has arrived, but not 0F1

The memory of what was sent is wanted until then, and nobody need wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from autopar.core.schedule import Action, ActionKind, Overlap, Schedule


class Message(NamedTuple):
    """Tensor between neighbouring stages: `stage`'s output for the next if `forward`, else the gradient of
    its input for the previous one."""

    stage: int
    forward: bool
    micro_batch: int

    @property
    def taker(self) -> int:
        """The stage that receives the message; it may lie beyond the last."""
        return self.stage + (1 if self.forward else -1)


Traffic: TypeAlias = dict[int, list[tuple[int, Message]]]  # by the other rank: place in the order, message


def sent_by(action: Action) -> Message | None:
    """The message that an action sends to another stage; None for gradients of weights, which stay."""
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return None
    return Message(action.stage, action.kind is ActionKind.FORWARD, action.micro_batch)


def needed_by(action: Action) -> Message | None:
    """The message that an action needs from another stage; None for gradients of weights."""
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return None
    forward = action.kind is ActionKind.FORWARD
    return Message(action.stage + (-1 if forward else 1), forward, action.micro_batch)


def leaves(schedule: Schedule, message: Message) -> bool:
    """Whether a message goes to another rank."""
    inside = 0 <= message.taker < schedule.stages
    return inside and schedule.rank_of(message.taker) != schedule.rank_of(message.stage)


@lru_cache(maxsize=256)
def proved(schedule: Schedule, rank: int) -> Mapping[Message, tuple[Message, ...]]:
    """For each message that a rank takes, what it sent the sender and now knows to have arrived. What it
    knew earlier is left out."""
    _, mine = _traffic(schedule, rank)
    found = {}
    for peer, taken in mine.items():
        sent, theirs = _traffic(schedule, peer)
        left = {message: place for place, message in sent[rank]}
        waiting = deque(theirs.get(rank, ()))
        for _, message in taken:
            arrived = []
            while waiting and waiting[0][0] <= left[message]:
                arrived.append(waiting.popleft()[1])
            if arrived:
                found[message] = tuple(arrived)
    return found


@lru_cache(maxsize=256)
def _traffic(schedule: Schedule, rank: int) -> tuple[Traffic, Traffic]:
    """Messages between a rank and each other one, with their places in the rank's order of actions."""
    sends: Traffic = {}
    takes: Traffic = {}
    for place, slot in enumerate(schedule.orders[rank]):
        for action in (slot.forward, slot.backward) if isinstance(slot, Overlap) else (slot,):
            out, need = sent_by(action), needed_by(action)
            for traffic, message, other in (
                (sends, out, out.taker if out else -1),
                (takes, need, need.stage if need else -1),
            ):
                if message and 0 <= other < schedule.stages and schedule.rank_of(other) != rank:
                    traffic.setdefault(schedule.rank_of(other), []).append((place, message))
    return sends, takes
