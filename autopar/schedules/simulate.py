"""A schedule in time: every action runs as soon as its rank is free and its inputs have come.

With rank(s) the rank that owns stage s, n a micro-batch, last the last stage:

    F of s, n   needs   F of s - 1, n                       unless s is 0
    B of s, n   needs   F of s, n and B or I of s + 1, n    the latter unless s is last; I likewise
    W of s, n   needs   I of s, n

    start = max(end of the rank's action before, arrival of every input)
    arrival = end of the input's action, plus the hop if its stage is on another rank

**Hops.** Sends don't hold up the sender. A link, from one rank to another, carries one hop at a time,
in the order of sending: without that a link slower than the stages would look as if it merely
added a latency. The two halves of an overlapped pair are sent when both are computed, as torch does.

    early    rank 0  F0F1F2                 late    rank 0  F0F1F2
             link      ~~~~~~                       link      ~~  ~~  ~~
             rank 1      F0F1F2                     rank 1      F0  F1  F2

`Receives.EARLY`: receives are posted ahead, so that hops run beside the receiver's work. torch's runtime
of several stages per rank does so. It posts them in an order that it fixes beforehand, so that one may
come later than here: a few hundredths of the time for ZB1P on several stages and for DualPipeV.
`Receives.LATE`: a rank posts a receive when nothing else is left to do before it, and waits.
ScheduleGPipe and Schedule1F1B do so and pay every hop that they receive.

**The end of a step.** A stage's gradients are summed after its last backward, one stage of the rank
after the other, while the rank computes on. The optimizer runs when the rank's actions, sends and
syncs are done. There is no barrier: a rank may update while another computes.

**Memory.** A rank always holds its stages' state and the batch; `kept` from the start of F to the end of
B or I, `kept_for_weight` from the end of I to the end of W, `sent_back` from the end of B or I to the start
of what needs the message that proves its arrival (deliveries.py), `working` while an action runs, or
`halving` if that is I, and `summing` when a stage's gradient sums start. Of the state `gradients` come with
a stage's first B or W, until whose end actions need `early` and `halving_early` instead.

A fixed order makes all times maxima of sums, so they never fall when a cost rises. torch leaves the
first stage's I empty and does all of its backward in W; every order of `autopar.schedules` puts the
two side by side there, so that the time is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from autopar.core.schedule import Action, ActionKind, Overlap, Schedule, ScheduleKind, Slot
from autopar.core.timeline import Event, HeldBytes, RankActivity, StageCost, Timeline
from autopar.errors import CheckError, InputError
from autopar.schedules.deliveries import leaves, needed_by, proved, sent_by

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT_GRADIENT, WEIGHT_GRADIENT = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


class Receives(Enum):
    """Moment at which a rank posts its receives: see the drawing above."""

    EARLY = "early"
    LATE = "late"

    @classmethod
    def of_torch(cls, kind: ScheduleKind) -> Receives:
        """Moment at which torch's own class for the schedule posts receives."""
        single = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)
        return cls.LATE if kind in single else cls.EARLY


def simulate(schedule: Schedule, costs: Sequence[StageCost], *, receives: Receives | None = None) -> Timeline:
    """The timeline of one training step; `costs[stage]` for every stage, receives as torch posts them
    unless said otherwise.

    Raises InputError if a stage has no cost or too many have, CheckError, naming the actions that
    wait for each other, if the orders deadlock.
    """
    if len(costs) != schedule.stages:
        raise InputError(
            where="simulation of a schedule",
            found=f"costs of {len(costs)} stages",
            wanted=f"costs of {schedule.stages} stages",
            remedy="give one StageCost per stage, in the order of stages",
        )
    run = ScheduleRun(schedule, costs, receives or Receives.of_torch(schedule.kind))
    run.all_actions()
    actions = tuple(run.events)
    events = [*actions, *(event for rank in range(schedule.ranks) for event in _ending(rank, actions, costs))]
    events.sort(key=lambda event: (event.start, event.rank, event.stop))
    held = tuple(tuple(_held(schedule, rank, actions, costs)) for rank in range(schedule.ranks))
    return Timeline(schedule, tuple(events), held)


class ScheduleRun:
    """The clocks of all ranks and links while the actions are run through."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], receives: Receives) -> None:
        self.schedule, self.costs, self.receives = schedule, costs, receives
        self.events: list[Event] = []
        self.free = [0.0] * schedule.ranks  # when a rank is done with what it began
        self.link_free: dict[tuple[int, int], float] = {}
        self.done: dict[Action, float] = {}  # when an action's result is there on its own rank
        self.sent: dict[Action, float] = {}  # when it is on the rank that needs it; late: when it may set out

    def all_actions(self) -> None:
        """Run every rank as far as it goes, again and again, until all have finished or all wait."""
        left = [list(_with_sends(order)) for order in self.schedule.orders]
        while any(left):
            ran = [self._advance(rank, todo) for rank, todo in enumerate(left)]
            left = [todo[count:] for todo, count in zip(left, ran, strict=True)]
            if not any(ran):
                raise self._deadlock([todo[0][0] for todo in left if todo])

    def _advance(self, rank: int, todo: Sequence[tuple[Action, Sequence[Action]]]) -> int:
        """Run the rank's actions until one waits for what isn't computed yet; how many ran."""
        for count, (action, sends) in enumerate(todo):
            if self._missing(action):
                return count
            start = max([self.free[rank], *map(self._arrival, self._elsewhere(action))])
            self.wait(rank, action, start)
            stop = self.run(rank, action, start)
            for computed in sends:
                self._send(computed, stop)
        return len(todo)

    def wait(self, rank: int, action: Action, start: float) -> None:
        """Let a rank wait until an action may start."""

    def run(self, rank: int, action: Action, start: float) -> float:
        """Run an action; when it stops."""
        stop = start + self.costs[action.stage].seconds(action.kind)
        self.free[rank] = self.done[_result(action)] = stop
        self.events.append(Event(rank, action.stage, action.micro_batch, action.kind, start, stop))
        return stop

    def _missing(self, action: Action) -> list[Action]:
        """The results that the action needs and that are not there, nor on their way."""
        elsewhere = self._elsewhere(action)
        return [
            needed
            for needed in _needs(action, self.schedule)
            if needed not in (self.sent if needed in elsewhere else self.done)
        ]

    def _elsewhere(self, action: Action) -> list[Action]:
        """The results that the action needs from other ranks."""
        rank = self.schedule.rank_of(action.stage)
        return [
            needed for needed in _needs(action, self.schedule) if self.schedule.rank_of(needed.stage) != rank
        ]

    def _arrival(self, needed: Action) -> float:
        """When a result of another rank arrives, if the rank that needs it now waits for it."""
        if self.receives is Receives.EARLY:
            return self.sent[needed]
        to = _receiver(needed)
        return self._hop(needed, max(self.sent[needed], self.free[self.schedule.rank_of(to)]))

    def _send(self, action: Action, seconds: float) -> None:
        """Send the action's result from `seconds` on, if it has a receiver on another rank."""
        to, rank = _receiver(action), self.schedule.rank_of(action.stage)
        if action.kind is WEIGHT_GRADIENT or not 0 <= to < self.schedule.stages:
            return
        if (other := self.schedule.rank_of(to)) == rank:
            return
        if self.receives is Receives.EARLY:
            seconds = self._hop(action, max(seconds, self.link_free.get((rank, other), 0.0)))
            self.link_free[rank, other] = seconds
        self.sent[_result(action)] = seconds

    def _hop(self, action: Action, start: float) -> float:
        """Carry a result over its link from `start` on; when it is there."""
        cost = self.costs[action.stage]
        seconds = cost.send_output if action.kind is FORWARD else cost.send_gradient
        rank, to, stop = self.schedule.rank_of(action.stage), _receiver(action), start + seconds
        if seconds:
            event = Event(rank, action.stage, action.micro_batch, RankActivity.SEND, start, stop, to)
            self.events.append(event)
        return stop

    def _deadlock(self, blocked: Sequence[Action]) -> CheckError:
        waits = [f"{action} for {', '.join(map(str, self._missing(action)))}" for action in blocked]
        return CheckError(
            where=f"simulation of {self.schedule.kind.value}",
            found="ranks that wait for each other: " + "; ".join(waits),
            wanted="orders in which some rank can always go on",
            remedy="make the schedule with autopar.schedules",
        )


def _with_sends(order: Sequence[Slot]) -> Iterator[tuple[Action, Sequence[Action]]]:
    """Every action of a rank with those whose results are sent once it is computed."""
    for slot in order:
        if isinstance(slot, Overlap):
            yield slot.forward, ()
            yield slot.backward, (slot.forward, slot.backward)
        else:
            yield slot, (slot,)


def _needs(action: Action, schedule: Schedule) -> list[Action]:
    """The results that an action needs: the table above."""
    stage, n = action.stage, action.micro_batch
    match action.kind:
        case ActionKind.FORWARD:
            return [Action(stage - 1, FORWARD, n)] if stage else []
        case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
            after = [Action(stage + 1, INPUT_GRADIENT, n)] if stage < schedule.stages - 1 else []
            return [Action(stage, FORWARD, n), *after]
        case ActionKind.WEIGHT_GRADIENT:
            return [Action(stage, INPUT_GRADIENT, n)]


def _result(action: Action) -> Action:
    """Action for whose result others wait: of a whole backward, its input gradient."""
    whole = action.kind is BACKWARD
    return Action(action.stage, INPUT_GRADIENT, action.micro_batch) if whole else action


def _receiver(action: Action) -> int:
    """The stage that takes the action's result, if there is such a stage."""
    return action.stage + (1 if action.kind is FORWARD else -1)


def _ending(rank: int, actions: Sequence[Event], costs: Sequence[StageCost]) -> Iterator[Event]:
    """The rank's gradient sums and optimizer updates."""
    own = [event for event in actions if event.rank == rank]
    backwards = {event.stage: event.stop for event in own if event.kind in (BACKWARD, WEIGHT_GRADIENT)}
    now = 0.0
    for stage, computed in sorted(backwards.items(), key=lambda item: (item[1], item[0])):
        if costs[stage].sync:
            start = max(now, computed)
            now = start + costs[stage].sync
            yield Event(rank, stage, None, RankActivity.SYNC, start, now)
    now = max([now, *(event.stop for event in own)])
    for stage in sorted(backwards):
        if costs[stage].update:
            yield Event(rank, stage, None, RankActivity.UPDATE, now, now + costs[stage].update)
            now += costs[stage].update


def _held(
    schedule: Schedule, rank: int, actions: Sequence[Event], costs: Sequence[StageCost]
) -> Iterator[HeldBytes]:
    """The rank's bytes after every change."""
    own = [cost for stage, cost in enumerate(costs) if schedule.rank_of(stage) == rank]
    now = sum(cost.state - cost.gradients + cost.lasting for cost in own)
    yield HeldBytes(0.0, now)
    begun: set[int] = set()  # stages that have made gradients
    arrived = proved(schedule, rank)
    mine = [event for event in actions if event.rank == rank]
    lasts = {event.stage: event for event in mine if event.kind in (BACKWARD, WEIGHT_GRADIENT)}
    for event in mine:
        if isinstance(event.kind, RankActivity):
            continue
        assert event.micro_batch is not None
        cost, action = costs[event.stage], Action(event.stage, event.kind, event.micro_batch)
        if needed := needed_by(action):
            now -= sum(costs[each.stage].sent_back for each in arrived.get(needed, ()) if not each.forward)
        if event.kind is FORWARD:
            now += cost.kept
        halved, early = event.kind is INPUT_GRADIENT, event.stage not in begun
        working = (cost.working, cost.early, cost.halving, cost.halving_early)[2 * halved + early]
        yield HeldBytes(event.start, now + working)
        match event.kind:
            case ActionKind.BACKWARD:
                now -= cost.kept
            case ActionKind.INPUT_GRADIENT:
                now += cost.kept_for_weight - cost.kept
            case ActionKind.WEIGHT_GRADIENT:
                now -= cost.kept_for_weight
        if (sent := sent_by(action)) and not sent.forward and leaves(schedule, sent):
            now += cost.sent_back
        if event.kind in (BACKWARD, WEIGHT_GRADIENT) and event.stage not in begun:
            begun.add(event.stage)
            now += cost.gradients
        if cost.summing and event is lasts[event.stage]:
            yield HeldBytes(event.stop, now + cost.summing)
        yield HeldBytes(event.stop, now)
