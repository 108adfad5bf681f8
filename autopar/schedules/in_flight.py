"""What the ranks of a pipeline hold at once under a schedule, counted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from autopar.core.schedule import Action, ActionKind, Schedule, ScheduleKind
from autopar.schedules.deliveries import leaves, needed_by, proved, sent_by
from autopar.schedules.orders import build_schedule
from autopar.schedules.simulate import Receives

Counts = tuple[int, ...]
Moments = tuple[Counts, ...]
LEARNING = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


class Flights(NamedTuple):
    """Counts of micro-batches that a rank holds, at the moments that may hold the most. `early` is until the
    end of its first B or W, `later` comes after that; `_half` is in the first half of a backward."""

    early: Moments
    early_half: Moments
    later: Moments
    later_half: Moments

    def all(self) -> Iterator[Counts]:
        """The moments of all kinds."""
        return chain.from_iterable(self)


@lru_cache(maxsize=64)
def scheduled(kind: ScheduleKind, ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    """The schedule, made once; raises InputError if torch can't run it."""
    return build_schedule(kind, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


@lru_cache(maxsize=64)
def flights(schedule: Schedule) -> tuple[Flights, ...]:
    """For each rank what its stages, in order, hold at once: micro-batches from F to B or I, then those whose
    backward is half done, from I to W, then gradients that were sent back and may not have arrived, which
    GPipe and 1F1B wait for."""
    found = []
    for rank in range(schedule.ranks):
        seen: tuple[set[Counts], ...] = (set(), set(), set(), set())
        later = False
        for action, during, _ in _counted(schedule, rank):
            seen[2 * later + (action.kind is ActionKind.INPUT_GRADIENT)].add(during)
            later = later or action.kind in LEARNING
        found.append(Flights(*map(_highest, seen)))
    return tuple(found)


@lru_cache(maxsize=64)
def endings(schedule: Schedule) -> tuple[tuple[Counts, ...], ...]:
    """For each rank what it holds, as in `flights`, when each of its stages has its last gradients."""
    found = []
    for rank in range(schedule.ranks):
        last = {
            action.stage: after for action, _, after in _counted(schedule, rank) if action.kind in LEARNING
        }
        found.append(tuple(last[stage] for stage in stages_of(schedule, rank)))
    return tuple(found)


def _counted(schedule: Schedule, rank: int) -> Iterator[tuple[Action, Counts, Counts]]:
    """The rank's actions, with what it holds while each runs and when it is over."""
    waits = Receives.of_torch(schedule.kind) is Receives.LATE
    own, arrived = stages_of(schedule, rank), proved(schedule, rank)
    now, half, back = ([0] * len(own) for _ in range(3))
    for action in schedule.actions(rank):
        stage, needed, out = own.index(action.stage), needed_by(action), sent_by(action)
        for each in arrived.get(needed, ()) if needed and not waits else ():
            back[own.index(each.stage)] -= not each.forward
        now[stage] += action.kind is ActionKind.FORWARD
        during = (*now, *half, *back)
        halved = action.kind is ActionKind.INPUT_GRADIENT
        now[stage] -= halved or action.kind is ActionKind.BACKWARD
        half[stage] += halved - (action.kind is ActionKind.WEIGHT_GRADIENT)
        if out and not out.forward and not waits and leaves(schedule, out):
            back[stage] += 1
        yield action, during, (*now, *half, *back)


def _highest(moments: set[Counts]) -> Moments:
    return tuple(sorted(each for each in moments if not any(_exceeds(other, each) for other in moments)))


@lru_cache(maxsize=1024)
def of_one(moments: Moments, place: int) -> Moments:
    """Moments of one of a rank's stages."""
    return _highest({each[place :: len(each) // 3] for each in moments})


def stages_of(schedule: Schedule, rank: int) -> list[int]:
    """The stages of a rank, in order."""
    return [stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]


def forwards_before(schedule: Schedule, rank: int) -> int:
    """Number of forwards before a rank's first other action. It is 1 for GPipe, all of whose forwards are on
    the way to its first gradient."""
    if schedule.kind is ScheduleKind.GPIPE:
        return 1
    actions = schedule.actions(rank)
    return next(index for index, action in enumerate(actions) if action.kind is not ActionKind.FORWARD)


def in_flight(counts: Counts) -> Counts:
    """Count for each stage of a rank the micro-batches that are in flight at one moment."""
    stages = len(counts) // 3
    return tuple(now + half for now, half in zip(counts[:stages], counts[stages : 2 * stages], strict=True))


def flight(schedule: Schedule, stage: int) -> int:
    """Most micro-batches that a stage keeps whole at once."""
    rank = schedule.rank_of(stage)
    place = stages_of(schedule, rank).index(stage)
    return max(counts[place] for counts in flights(schedule)[rank].all())


def mean_flight(schedule: Schedule) -> float:
    """Most micro-batches that a stage keeps whole at once, on average over stages."""
    per_rank = schedule.stages_per_rank
    most = (max(sum(counts[:per_rank]) for counts in each.all()) for each in flights(schedule))
    return sum(most) / schedule.stages


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
