"""Gradients of weights that are made while a rank waits: nobody waits for them.

The orders of `autopar.schedules` wait nowhere if all stages take the same time, and put off some W so that
gradients of inputs come early. Where stages differ a rank waits between those, and has the W left at the end:

    before   1I5  wait     1I6  wait     1I7  1W5 1W6 1W7
    filled   1I5  1W5      1I6  1W6      1I7  1W7

A W moves forward into a wait that is long enough for it, so that nothing starts later than before, and no
rank keeps more. Qi et al. (2024) search whole orders for given times; here all else stays where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ALWAYS_SPLIT, Action, ActionKind, Schedule, Slot
from autopar.core.timeline import StageCost
from autopar.schedules.orders import build_schedule
from autopar.schedules.simulate import Receives, ScheduleRun

I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741


def filled(schedule: Schedule, costs: Sequence[StageCost]) -> Schedule:
    """The schedule with its waits filled, as they are if stages take what `costs` say; the same for the same
    costs. Those that split no backward have nothing to fill them with, and DualPipeV splits none but those
    whose W fill its waits."""
    if schedule.kind not in ALWAYS_SPLIT:
        return schedule
    run = _Filling(schedule, costs, Receives.of_torch(schedule.kind))
    run.all_actions()
    return replace(schedule, orders=tuple(map(run.order, range(schedule.ranks))))


def order_of(pipeline: Pipeline) -> Schedule:
    """The schedule by which a pipeline with stages runs, its waits filled as the plan says."""
    plain = build_schedule(
        pipeline.schedule,
        ranks=pipeline.ranks,
        stages_per_rank=pipeline.num_stages // pipeline.ranks,
        micro_batches=pipeline.micro_batches,
    )
    return filled(plain, pipeline.filling) if pipeline.filling else plain


class _Filling(ScheduleRun):
    """Runs W early while a rank waits; `moved[rank]` says before which action it ran which."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], receives: Receives) -> None:
        super().__init__(schedule, costs, receives)
        self.pending: list[deque[Action]] = [deque() for _ in range(schedule.ranks)]  # their I is done
        self.moved: list[dict[Action, list[Action]]] = [{} for _ in range(schedule.ranks)]
        self.early: set[Action] = set()

    def wait(self, rank: int, action: Action, start: float) -> None:
        pending = self.pending[rank]
        while action.kind is not W and pending:
            stop = self.free[rank] + self.costs[pending[0].stage].seconds(W)
            if stop > start:
                break
            first = pending.popleft()
            super().run(rank, first, self.free[rank])
            self.moved[rank].setdefault(action, []).append(first)
            self.early.add(first)

    def run(self, rank: int, action: Action, start: float) -> float:
        if action in self.early:  # there is nothing left to do
            return self.free[rank]
        if action.kind is W:
            self.pending[rank].remove(action)
        stop = super().run(rank, action, start)
        if action.kind is I:
            self.pending[rank].append(Action(action.stage, W, action.micro_batch))
        return stop

    def order(self, rank: int) -> tuple[Slot, ...]:
        """The rank's order with each W where it ran."""
        found: list[Slot] = []
        for slot in self.schedule.orders[rank]:
            if slot not in self.early:
                assert isinstance(slot, Action)
                found += [*self.moved[rank].get(slot, ()), slot]
        return tuple(found)
