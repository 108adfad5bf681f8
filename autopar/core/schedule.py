"""A pipeline schedule as data: which rank computes what, in which order.

The words are those of `torch.distributed.pipelining`. The model is cut into stages, the batch into
micro-batches, and every rank owns one or more stages. An action is one stage's work on one
micro-batch, written `stage kind micro-batch` as in `2F0`:

    F  forward      B  the whole backward      I  gradients of inputs only      W  gradients of weights

B is I and W at once; a schedule that splits them fills waiting time with W, which nobody waits for.
Two ways of giving stages to ranks, here four ranks with two stages each:

    loop   rank  0 1 2 3          V   rank  0 1 2 3
          stages 0 1 2 3             stages 0 1 2 3
                 4 5 6 7                    7 6 5 4

Only the order within each rank is data. When an action runs follows from it: see `autopar.simulate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from autopar.errors import CheckError, InputError


class ScheduleKind(Enum):
    """The schedules; `autopar.schedules` draws each."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB1P = "zb1p"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"

    @property
    def is_v(self) -> bool:
        """Whether stages turn back at the last rank, so that rank 0 owns the first and the last stage."""
        return self in (ScheduleKind.ZBV, ScheduleKind.DUALPIPEV)


ALWAYS_SPLIT = (ScheduleKind.ZB1P, ScheduleKind.ZBV)  # each backward in two, inputs' and weights'
SPLIT_BACKWARD = (*ALWAYS_SPLIT, ScheduleKind.DUALPIPEV)  # some


class ActionKind(Enum):
    """Kind of an action; values are torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward of two stages that torch runs as one action.

    It computes them one after the other and sends what both give afterwards.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Slot: TypeAlias = Action | Overlap


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of work of each rank; `orders[rank]` holds every action of the rank's stages once.

    Raises InputError if the numbers break a rule of `check_schedule`, CheckError if an action is
    missing, repeated, or on a rank that doesn't own its stage. Waiting in circles shows in simulation.
    """

    kind: ScheduleKind
    ranks: int
    stages_per_rank: int
    micro_batches: int
    orders: tuple[tuple[Slot, ...], ...]

    def __post_init__(self) -> None:
        check_schedule(
            self.kind,
            ranks=self.ranks,
            stages_per_rank=self.stages_per_rank,
            micro_batches=self.micro_batches,
        )
        _check_orders(self)

    def __hash__(self) -> int:
        """Hash of all fields but the orders, which are long and follow from the others except in tests."""
        return hash((self.kind, self.ranks, self.stages_per_rank, self.micro_batches))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that owns `stage`."""
        return rank_of_stage(self.kind, stage, self.ranks)

    def actions(self, rank: int) -> Iterator[Action]:
        """The rank's actions one by one, overlapped ones in the order in which they are computed."""
        for slot in self.orders[rank]:
            if isinstance(slot, Overlap):
                yield from (slot.forward, slot.backward)
            else:
                yield slot

    def __str__(self) -> str:
        """A line per rank: `rank 0  0F0 0F1 0B0 0B1`."""
        return "\n".join(
            f"rank {rank}  " + " ".join(map(str, order)) for rank, order in enumerate(self.orders)
        )


def rank_of_stage(kind: ScheduleKind, stage: int, ranks: int) -> int:
    """The rank that owns `stage`: see the drawing above."""
    lap, place = divmod(stage, ranks)
    return ranks - 1 - place if kind.is_v and lap % 2 else place


def check_schedule(kind: ScheduleKind, *, ranks: int, stages_per_rank: int, micro_batches: int) -> None:
    """Raise InputError, naming every broken rule, if torch could not run the schedule.

    The rules are those of the constructors in `torch.distributed.pipelining.schedules`.
    """
    broken = list(_broken(kind, ranks, stages_per_rank, micro_batches))
    if broken:
        found, wanted, remedies = zip(*broken, strict=True)
        raise InputError(
            where=f"schedule {kind.value} on {_count(ranks, 'rank')}",
            found=", ".join(found),
            wanted=", ".join(wanted),
            remedy="; ".join(remedies),
        )


def micro_batches_per_round(ranks: int, micro_batches: int) -> int:
    """Micro-batches that an interleaved schedule runs through a stage before it turns to the next.

    As many as there are ranks if that divides; else rounds are a little longer.
    """
    return micro_batches // max(1, micro_batches // ranks)


def _broken(kind: ScheduleKind, ranks: int, stages: int, micro: int) -> Iterator[tuple[str, str, str]]:
    """Found, wanted and remedy of each broken rule; `stages` are a rank's."""
    counts = {"rank": ranks, "stage per rank": stages, "micro-batch": micro}
    if small := [_count(number, name) for name, number in counts.items() if number < 1]:
        yield ", ".join(small), "at least 1 of each", "give whole numbers from 1"
        return
    match kind:
        case ScheduleKind.GPIPE | ScheduleKind.ONE_F_ONE_B:
            if stages != 1:
                remedy = "take interleaved or zb1p for several stages per rank"
                yield _count(stages, "stage per rank"), "1 stage per rank", remedy
            if kind is ScheduleKind.ONE_F_ONE_B and micro < ranks:
                yield _few(micro, ranks, "as many as stages; gpipe takes fewer")
        case ScheduleKind.INTERLEAVED | ScheduleKind.ZB1P:
            rounds = max(1, micro // ranks)
            if micro % rounds:
                below = micro - micro % rounds
                yield (
                    _count(micro, "micro-batch"),
                    f"a multiple of the {rounds} rounds that {micro} // {ranks} gives",
                    f"use {below} micro-batches, or any multiple of {ranks}",
                )
        case ScheduleKind.ZBV | ScheduleKind.DUALPIPEV:
            if stages != 2:
                remedy = "cut the model into twice as many stages as ranks"
                yield _count(stages, "stage per rank"), "exactly 2 stages per rank", remedy
            if kind is ScheduleKind.DUALPIPEV and micro < 2 * ranks:
                yield _few(micro, 2 * ranks, "twice as many as ranks; zbv takes fewer")


def _few(micro: int, least: int, why: str) -> tuple[str, str, str]:
    return _count(micro, "micro-batch"), f"at least {least} micro-batches", f"use {why}"


def _count(number: int, name: str) -> str:
    first, *rest = name.split(" ")
    plural = {"micro-batch": "micro-batches"}.get(first, first + "s")
    return " ".join([str(number), first if number == 1 else plural, *rest])


def _check_orders(schedule: Schedule) -> None:
    """Every rank does all of its own stages' work exactly once, and nothing else."""
    if len(schedule.orders) != schedule.ranks:
        raise _wrong(f"{len(schedule.orders)} orders", f"one for each of {schedule.ranks} ranks")
    for rank in range(schedule.ranks):
        done = Counter(map(str, _halves(schedule.actions(rank))))
        wanted = Counter(
            str(Action(stage, kind, micro_batch))
            for stage in range(schedule.stages)
            if schedule.rank_of(stage) == rank
            for micro_batch in range(schedule.micro_batches)
            for kind in ActionKind
            if kind is not ActionKind.BACKWARD
        )
        if done != wanted:
            faults = [f"{name} too often" for name in done - wanted] + [
                f"no {name}" for name in wanted - done
            ]
            raise _wrong(
                f"on rank {rank} " + ", ".join(faults),
                "each action once, on its stage's rank (B counts as I, W)",
            )


def _halves(actions: Iterator[Action]) -> Iterator[Action]:
    """The actions with every B as its I and W."""
    for action in actions:
        if action.kind is ActionKind.BACKWARD:
            yield Action(action.stage, ActionKind.INPUT_GRADIENT, action.micro_batch)
            yield Action(action.stage, ActionKind.WEIGHT_GRADIENT, action.micro_batch)
        else:
            yield action


def _wrong(found: str, wanted: str) -> CheckError:
    return CheckError(
        where="orders of a schedule", found=found, wanted=wanted, remedy="make it with autopar.schedules"
    )
