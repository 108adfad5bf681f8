"""What a schedule's stages cost, and the timeline that follows: when everything runs, what is held."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import chain
from typing import TypeAlias

from autopar.core.costs import refuse_bad
from autopar.core.schedule import ActionKind, Schedule


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one stage on one device of its rank.

    A whole backward takes `input_gradient + weight_gradient`. The two sends are what this stage's
    output and input gradient take to reach the next and the previous stage; they count only
    where that stage is on another rank.
    """

    forward: float  # seconds per micro-batch, as the next four
    input_gradient: float
    weight_gradient: float
    send_output: float = 0.0
    send_gradient: float = 0.0
    sync: float = 0.0  # seconds per step to sum gradients, from the stage's last backward on
    update: float = 0.0  # seconds per step of the optimizer
    state: int = 0  # bytes of weights, gradients and optimizer state
    lasting: int = 0  # bytes beside the state that are there all step, such as the batch
    kept: int = 0  # bytes that each micro-batch in flight keeps from its F to its B or I
    kept_for_weight: int = 0  # bytes that it keeps from then to its W
    sent_back: int = 0  # bytes of a gradient that it has sent, from its B or I until it is known to have come
    working: int = 0  # bytes that an action needs beside all that while it runs
    gradients: int = 0  # bytes of the state that are there from the stage's first B or W on
    early: int = 0  # as `working`, until then
    halving: int = 0  # as `working`, of the first half of a split backward
    halving_early: int = 0  # as `early`, of that
    summing: int = 0  # as `working`, when the sums of its gradients start, after its last B or W

    def __post_init__(self) -> None:
        refuse_bad("stage cost", **asdict(self))

    def seconds(self, kind: ActionKind) -> float:
        """Seconds of one action."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward
            case ActionKind.BACKWARD:
                return self.input_gradient + self.weight_gradient
            case ActionKind.INPUT_GRADIENT:
                return self.input_gradient
            case ActionKind.WEIGHT_GRADIENT:
                return self.weight_gradient


class RankActivity(Enum):
    """Activity of a rank beside its actions."""

    SEND = "send"
    SYNC = "sync"
    UPDATE = "update"
    RECOMPUTE = "recompute"
    COPIES = "copies"  # to and from the host's memory, for which it waits


EventKind: TypeAlias = ActionKind | RankActivity
COMPUTING = (RankActivity.UPDATE, RankActivity.RECOMPUTE)


class Phase(Enum):
    """Phase of a step on a device without stages."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    COPIES = "copies"
    SUMS = "sums"
    OPTIMIZER = "optimizer"

    @property
    def is_once(self) -> bool:
        """Whether the phase comes once a step, not once a micro-batch."""
        return self in (Phase.SUMS, Phase.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of a step without stages on one device: its seconds, and the most bytes that are held meanwhile.

    It is of the operator with the number `layer` in the plan, and of conversions of what that takes; of none
    where the device waits for copies, sums gradients or updates weights. `seconds` are those that nothing
    hides; of sums so many more are `hidden` behind the last backward pass.
    """

    phase: Phase
    layer: int | None
    seconds: float
    nbytes: int
    hidden: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a rank, for a stage, from `start` to `stop`, in seconds from the step's start."""

    rank: int
    stage: int
    micro_batch: int | None
    kind: EventKind
    start: float
    stop: float
    to_stage: int | None = None
    label: str = ""

    @property
    def computes(self) -> bool:
        """Whether the event occupies the device: actions and the optimizer do, sends and syncs don't."""
        return isinstance(self.kind, ActionKind) or self.kind in COMPUTING

    def __str__(self) -> str:
        """Torch's words for actions and sends, as in `2F0` and `2SEND_F0`; `sync 2` and `update 2`; or the
        label."""
        if self.label:
            return self.label
        if self.micro_batch is None:
            return f"{self.kind.value} {self.stage}"
        if self.to_stage is None:
            return f"{self.stage}{self.kind.value}{self.micro_batch}"
        return f"{self.stage}SEND_{'F' if self.to_stage > self.stage else 'B'}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that a rank holds from `seconds` on, until the next such entry."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The most that a rank holds, and when first."""

    rank: int
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated training step; `events` in the order of their start, `held` for each rank."""

    schedule: Schedule
    events: tuple[Event, ...]
    held: tuple[tuple[HeldBytes, ...], ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last rank is done."""
        return max((event.stop for event in self.events), default=0.0)

    @property
    def coarse(self) -> Timeline:
        """The timeline without operators: what a rank does of one kind for a micro-batch without a break."""
        joined: dict[tuple[int, int], list[Event]] = {}
        for event in self.events:
            own = joined.setdefault((event.rank, event.stage), [])
            last = own[-1] if own else event
            if own and event.label and (event.kind, event.micro_batch) == (last.kind, last.micro_batch):
                own[-1] = replace(last, stop=event.stop, label="")
            else:
                own.append(event)
        events = sorted(
            chain.from_iterable(joined.values()), key=lambda each: (each.start, each.rank, each.stop)
        )
        return replace(self, events=tuple(events))

    def busy_seconds(self, rank: int) -> float:
        """Seconds for which the rank computes, the optimizer included."""
        return sum(event.stop - event.start for event in self.events if event.rank == rank and event.computes)

    def bubble(self, rank: int) -> float:
        """The share of the step in which the rank computes nothing."""
        return 1 - self.busy_seconds(rank) / self.seconds if self.seconds else 0.0

    def peak_of(self, rank: int) -> RankPeak:
        most = max(self.held[rank], key=lambda held: held.nbytes)
        return RankPeak(rank, most.seconds, most.nbytes)

    @property
    def peak(self) -> RankPeak:
        """The highest of all ranks' peaks; the first rank's among equals."""
        return max(map(self.peak_of, range(self.schedule.ranks)), key=lambda peak: peak.nbytes)
