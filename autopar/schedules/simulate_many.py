"""The step times of many cuts under one schedule, all at once: `autopar.simulate` on vectors of costs.

Which action waits for which is a matter of the schedule alone. So its actions are put into waves, at most
one of each rank in a wave, and all that an action waits for into waves before its own:

    wave     1    2    3    4    5             start = max(end of the rank's action before, arrival)
    rank 0  0F0  0F1   .    .   0B0            end   = start + the action's seconds
    rank 1   .   1F0  1B0  1F1  1B1

Every time is a row with an entry for each cut, and a wave a few operations on the rows of its ranks. A
result that waits to be taken has a slot, which is then another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from autopar.core.schedule import Action, ActionKind, Overlap, Schedule, Slot
from autopar.schedules.deliveries import Message, leaves, needed_by, sent_by
from autopar.schedules.simulate import Receives

Seconds: TypeAlias = Any  # a float array [stage, cut], or [cut] of one stage
Rows: TypeAlias = Any  # numbers of rows, [place]
Turn: TypeAlias = tuple[Action, tuple[Message, ...]]  # an action, and what it leaves for other stages


@dataclass(frozen=True, slots=True)
class CutCosts:
    """Seconds as in `StageCost`, for each stage of each cut."""

    forward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    send_output: Seconds
    send_gradient: Seconds
    sync: Seconds
    update: Seconds


@dataclass(frozen=True, slots=True)
class Transfers:
    """Messages on their way to, or from, the actions at `places` in one wave."""

    places: Rows
    slots: Rows
    hops: Rows  # of the hops' seconds
    links: Rows


@dataclass(frozen=True, slots=True)
class Wave:
    """Actions of different ranks that run side by side.

    After those at `last` the backward pass of `stages` may be over. An overlapped pair sends two results,
    one after the other.
    """

    ranks: Rows
    work: Rows  # of the actions' seconds
    last: Rows
    stages: Rows
    taken: Transfers | None
    sent: tuple[Transfers, ...]


@dataclass(frozen=True, slots=True)
class Waves:
    """A schedule in waves; links by their number lead from `senders`."""

    waves: tuple[Wave, ...]
    slots: int
    senders: tuple[int, ...]


def step_seconds(schedule: Schedule, costs: CutCosts) -> Seconds:
    """Seconds of a training step for each cut, [cut]; those that `simulate` gives one by one."""
    return _Run(schedule, costs, in_waves(schedule)).seconds()


# -- the order ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def in_waves(schedule: Schedule) -> Waves:
    """All ranks' actions, each as early as what it waits for allows."""
    writer = _WaveWriter(schedule)
    waves = tuple(writer.wave(turns) for turns in _by_wave(schedule))
    return Waves(waves, writer.slots, tuple(sender for sender, _ in writer.links))


def _by_wave(schedule: Schedule) -> list[list[Turn]]:
    orders = [list(_turns(order)) for order in schedule.orders]
    place, wave = [0] * schedule.ranks, [-1] * schedule.ranks
    ready: dict[Message, int] = {}  # the wave after which a result is there
    found: list[list[Turn]] = []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                action, results = order[place[rank]]
                needed = _needed(action, schedule)
                if needed and needed not in ready:
                    break
                wave[rank] = 1 + max(wave[rank], ready[needed] if needed else -1)
                if wave[rank] == len(found):
                    found.append([])
                found[wave[rank]].append((action, results))
                ready |= dict.fromkeys(results, wave[rank])
                place[rank] += 1
                moved = True
    assert all(at == len(order) for at, order in zip(place, orders, strict=True)), "a schedule that deadlocks"
    return found


def _turns(order: Sequence[Slot]) -> Iterator[Turn]:
    """The halves of an overlapped pair are sent when both are computed."""
    for slot in order:
        if isinstance(slot, Overlap):
            yield slot.forward, ()
            yield slot.backward, _messages(slot.forward, slot.backward)
        else:
            yield slot, _messages(slot)


def _messages(*actions: Action) -> tuple[Message, ...]:
    return tuple(message for action in actions if (message := sent_by(action)))


def _needed(action: Action, schedule: Schedule) -> Message | None:
    """The result of another rank that an action waits for."""
    message = needed_by(action)
    if message is None or not 0 <= message.stage < schedule.stages:
        return None
    if schedule.rank_of(message.stage) == schedule.rank_of(action.stage):
        return None  # it has run before on this very rank
    return message


class _WaveWriter:
    """Numbers what a wave's actions read and write."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.links: dict[tuple[int, int], int] = {}
        self.held: dict[Message, int] = {}
        self.free: list[int] = []
        self.slots = 0

    def wave(self, turns: Sequence[Turn]) -> Wave:
        taken, sent = [], ([], [])  # type: ignore[var-annotated]
        for place, (action, _) in enumerate(turns):
            if needed := _needed(action, self.schedule):
                taken.append((place, self.held.pop(needed), *self.way(needed)))
        self.free += [slot for _, slot, _, _ in taken]
        for place, (_, results) in enumerate(turns):
            leaving = [result for result in results if leaves(self.schedule, result)]
            for row, result in zip(sent, leaving, strict=False):
                row.append((place, self.hold(result), *self.way(result)))
        done = [
            place
            for place, (action, _) in enumerate(turns)
            if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
        ]
        kinds = list(ActionKind)
        return Wave(
            ranks=np.array([self.schedule.rank_of(action.stage) for action, _ in turns]),
            work=np.array(
                [kinds.index(action.kind) * self.schedule.stages + action.stage for action, _ in turns]
            ),
            last=np.array(done, dtype=np.intp),
            stages=np.array([turns[place][0].stage for place in done], dtype=np.intp),
            taken=_transfers(taken) if taken else None,
            sent=tuple(_transfers(row) for row in sent if row),
        )

    def hold(self, result: Message) -> int:
        """A slot for a result."""
        if self.free:
            slot = self.free.pop()
        else:
            slot, self.slots = self.slots, self.slots + 1
        self.held[result] = slot
        return slot

    def way(self, result: Message) -> tuple[int, int]:
        """The rows of a result's hop and link."""
        link = self.schedule.rank_of(result.stage), self.schedule.rank_of(result.taker)
        hop = result.stage if result.forward else self.schedule.stages + result.stage
        return hop, self.links.setdefault(link, len(self.links))


def _transfers(rows: Sequence[tuple[int, int, int, int]]) -> Transfers:
    return Transfers(*np.array(rows).T)


# -- the clock ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """The clocks of ranks and links; `held` is when a result is on the rank that needs it, or, where
    receives are late, when it may set out."""

    schedule: Schedule
    costs: CutCosts
    waves: Waves
    late: bool = field(init=False)
    work: Seconds = field(init=False)
    hops: Seconds = field(init=False)
    counts: Any = field(init=False)  # whether a hop takes any time
    free: Seconds = field(init=False)  # [rank, cut]
    links: Seconds = field(init=False)  # [link, cut]
    held: Seconds = field(init=False)  # [slot, cut]
    backward: Seconds = field(init=False)  # the end of each stage's last one
    delivered: Seconds = field(init=False)  # the end of each link's last send

    def __post_init__(self) -> None:
        costs, cuts = self.costs, self.costs.forward.shape[1]
        self.late = Receives.of_torch(self.schedule.kind) is Receives.LATE
        seconds = {
            ActionKind.FORWARD: costs.forward,
            ActionKind.BACKWARD: costs.input_gradient + costs.weight_gradient,
            ActionKind.INPUT_GRADIENT: costs.input_gradient,
            ActionKind.WEIGHT_GRADIENT: costs.weight_gradient,
        }
        self.work = np.concatenate([seconds[kind] for kind in ActionKind])
        self.hops = np.concatenate([costs.send_output, costs.send_gradient])
        self.counts = self.hops > 0
        links = len(self.waves.senders)
        self.free, self.backward = np.zeros((self.schedule.ranks, cuts)), np.zeros_like(costs.forward)
        self.held = np.zeros((self.waves.slots, cuts))
        self.links, self.delivered = np.zeros((links, cuts)), np.zeros((links, cuts))

    def seconds(self) -> Seconds:
        for wave in self.waves.waves:
            self.run(wave)
        return np.max([self.end(rank) for rank in range(self.schedule.ranks)], axis=0)

    def run(self, wave: Wave) -> None:
        now = self.free[wave.ranks]
        if taken := wave.taken:
            arrival, waiting = self.held[taken.slots], now[taken.places]
            if self.late:
                arrival = self.carry(taken, np.maximum(arrival, waiting))
            now[taken.places] = np.maximum(waiting, arrival)
        now += self.work[wave.work]
        self.free[wave.ranks] = now
        self.backward[wave.stages] = now[wave.last]
        for sent in wave.sent:
            begin = now[sent.places]
            if not self.late:
                begin = self.carry(sent, np.maximum(begin, self.links[sent.links]))
                self.links[sent.links] = begin
            self.held[sent.slots] = begin

    def carry(self, transfers: Transfers, begin: Seconds) -> Seconds:
        """Arrival times of transfers that begin at `begin`."""
        arrival, before = begin + self.hops[transfers.hops], self.delivered[transfers.links]
        counts = self.counts[transfers.hops]
        self.delivered[transfers.links] = np.where(counts, np.maximum(before, arrival), before)
        return arrival

    def end(self, rank: int) -> Seconds:
        """Seconds at which a rank's sends and gradient sums, one after the other, and then its updates are
        done."""
        stages = np.asarray([s for s in range(self.schedule.stages) if self.schedule.rank_of(s) == rank])
        computed = self.backward[stages]
        order = np.argsort(computed, axis=0, kind="stable")
        sync = np.take_along_axis(self.costs.sync[stages], order, axis=0)
        now = np.zeros_like(computed[0])
        for turn, ready in enumerate(np.take_along_axis(computed, order, axis=0)):
            now = np.where(sync[turn] > 0, np.maximum(now, ready) + sync[turn], now)
        own = [link for link, sender in enumerate(self.waves.senders) if sender == rank]
        done = np.maximum(np.maximum(now, self.free[rank]), self.delivered[own].max(axis=0, initial=0.0))
        return done + self.costs.update[stages].sum(axis=0)
