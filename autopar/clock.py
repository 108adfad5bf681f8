"""The step times of many cuts under one schedule, all at once: `autopar.simulate` on vectors of costs.

Which action waits for which is a matter of the schedule alone. So the actions are put into one order in
which each comes after all that it waits for, and every time becomes a vector with an entry for each cut:

    order   0F0  0F1  1F0  1B0  0B0 ...           start = max(end of the rank's action before, arrivals)
    cut A     2    4    3    5    7               end   = start + the action's seconds
    cut B     1    2    4    8   10
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from autopar.core.schedule import Action, ActionKind, Overlap, Schedule, Slot
from autopar.simulate import Receives

Seconds: TypeAlias = Any  # a float array [stage, cut], or [cut] of one stage


@dataclass(frozen=True, slots=True)
class CutCosts:
    """What `StageCost` holds, in seconds, for each stage of each cut."""

    forward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    send_output: Seconds
    send_gradient: Seconds
    sync: Seconds
    update: Seconds


def step_seconds(schedule: Schedule, costs: CutCosts) -> Seconds:
    """Seconds of a training step for each cut, [cut]; those that `simulate` gives one by one."""
    return _Run(schedule, costs).seconds()


def in_order(schedule: Schedule) -> tuple[tuple[Action, tuple[Action, ...]], ...]:
    """All ranks' actions, each behind all that it needs, with those whose results are sent after it."""
    left = [list(_with_sends(order)) for order in schedule.orders]
    place = [0] * schedule.ranks
    done: set[tuple[int, bool, int]] = set()
    found: list[tuple[Action, tuple[Action, ...]]] = []
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(left):
            while place[rank] < len(todo):
                action, sends = todo[place[rank]]
                if not done.issuperset(_needs(action, schedule.stages)):
                    break
                if action.kind is not ActionKind.WEIGHT_GRADIENT:
                    done.add((action.stage, action.kind is ActionKind.FORWARD, action.micro_batch))
                found.append((action, sends))
                place[rank] += 1
                moved = True
    assert all(at == len(todo) for at, todo in zip(place, left, strict=True)), "a schedule that deadlocks"
    return tuple(found)


def _with_sends(order: Sequence[Slot]) -> Iterator[tuple[Action, tuple[Action, ...]]]:
    """The halves of an overlapped pair are sent when both are computed."""
    for slot in order:
        if isinstance(slot, Overlap):
            yield slot.forward, ()
            yield slot.backward, (slot.forward, slot.backward)
        else:
            yield slot, (slot,)


def _needs(action: Action, stages: int) -> Iterator[tuple[int, bool, int]]:
    """The results (stage, forward?, micro-batch) of other stages that an action waits for."""
    if action.kind is ActionKind.FORWARD:
        if action.stage:
            yield action.stage - 1, True, action.micro_batch
    elif action.kind is not ActionKind.WEIGHT_GRADIENT and action.stage < stages - 1:
        yield action.stage + 1, False, action.micro_batch


@dataclass(slots=True)
class _Run:
    """The clocks of ranks and links; `sent` is when a result is on the rank that needs it, or, where
    receives are late, when it may set out."""

    schedule: Schedule
    costs: CutCosts
    late: bool = field(init=False)
    free: list[Seconds] = field(init=False)
    links: dict[tuple[int, int], Seconds] = field(default_factory=dict)
    sent: dict[tuple[int, bool, int], Seconds] = field(default_factory=dict)
    backward: dict[int, Seconds] = field(default_factory=dict)  # the end of each stage's last one
    delivered: list[Seconds] = field(init=False)  # the end of each rank's last send

    def __post_init__(self) -> None:
        self.late = Receives.of_torch(self.schedule.kind) is Receives.LATE
        self.free, self.delivered = (
            [np.zeros(self.costs.forward.shape[1]) for _ in range(self.schedule.ranks)] for _ in range(2)
        )

    def seconds(self) -> Seconds:
        for action, sends in in_order(self.schedule):
            self.run(action)
            for result in sends:
                self.send(result, self.free[self.schedule.rank_of(action.stage)])
        return np.max([self.end(rank) for rank in range(self.schedule.ranks)], axis=0)

    def run(self, action: Action) -> None:
        rank = self.schedule.rank_of(action.stage)
        start = self.free[rank]
        for needed in _needs(action, self.schedule.stages):
            if self.schedule.rank_of(needed[0]) == rank:
                continue  # it has run before on this very rank
            arrival = self.sent.pop(needed)
            if self.late:
                arrival = np.maximum(arrival, self.free[rank])
                arrival = self.carry(needed[0], arrival, forward=needed[1])
            start = np.maximum(start, arrival)
        self.free[rank] = start + self.duration(action)
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            self.backward[action.stage] = self.free[rank]

    def duration(self, action: Action) -> Seconds:
        stage, costs = action.stage, self.costs
        match action.kind:
            case ActionKind.FORWARD:
                return costs.forward[stage]
            case ActionKind.INPUT_GRADIENT:
                return costs.input_gradient[stage]
            case ActionKind.WEIGHT_GRADIENT:
                return costs.weight_gradient[stage]
            case ActionKind.BACKWARD:
                return costs.input_gradient[stage] + costs.weight_gradient[stage]

    def carry(self, stage: int, begin: Seconds, *, forward: bool) -> Seconds:
        """When what a stage sends from `begin` on has arrived."""
        hop = (self.costs.send_output if forward else self.costs.send_gradient)[stage]
        rank, arrival = self.schedule.rank_of(stage), begin + hop
        self.delivered[rank] = np.where(
            hop > 0, np.maximum(self.delivered[rank], arrival), self.delivered[rank]
        )
        return arrival

    def send(self, action: Action, now: Seconds) -> None:
        forward = action.kind is ActionKind.FORWARD
        to = action.stage + (1 if forward else -1)
        if action.kind is ActionKind.WEIGHT_GRADIENT or not 0 <= to < self.schedule.stages:
            return
        link = self.schedule.rank_of(action.stage), self.schedule.rank_of(to)
        if link[0] == link[1]:
            return
        if not self.late:
            begin = np.maximum(now, self.links[link]) if link in self.links else now
            self.links[link] = now = self.carry(action.stage, begin, forward=forward)
        self.sent[action.stage, forward, action.micro_batch] = now

    def end(self, rank: int) -> Seconds:
        """When the rank's sends and gradient sums, one after the other, and then its updates are done."""
        stages = np.asarray([s for s in range(self.schedule.stages) if self.schedule.rank_of(s) == rank])
        computed = np.stack([self.backward[stage] for stage in stages])
        order = np.argsort(computed, axis=0, kind="stable")
        sync = np.take_along_axis(self.costs.sync[stages], order, axis=0)
        now = np.zeros_like(computed[0])
        for turn, ready in enumerate(np.take_along_axis(computed, order, axis=0)):
            now = np.where(sync[turn] > 0, np.maximum(now, ready) + sync[turn], now)
        done = np.maximum(np.maximum(now, self.free[rank]), self.delivered[rank])
        return done + self.costs.update[stages].sum(axis=0)
