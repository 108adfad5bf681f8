"""A step without stages over time: what one device does and holds, moment by moment.

    seconds   | op 0 | op 1 | op 2 | op 2 | op 1' | op 1 | op 0 | sums | optimizer
    bytes     |  __--- ------------- ______-------  ---____

Moments are those of one micro-batch, as the replay of peak_memory.py goes through it, then what is done
once a step. Their seconds, those of the micro-batch times their number, add up to the step; the most of
their bytes is the peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from autopar.core.graph import InputKind
from autopar.core.timeline import Moment, Phase
from autopar.cost.program.early import hidden_seconds
from autopar.cost.program.gathering import regathers
from autopar.cost.program.heap import Heap
from autopar.cost.program.offload import wait_seconds
from autopar.cost.program.peak_memory import Replay
from autopar.cost.program.recompute import repeated
from autopar.cost.program.recomputed_parts import RecomputedPart
from autopar.cost.program.step import move_seconds

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram

Key = tuple[Phase, int]


def moments(priced: PricedProgram) -> tuple[Moment, ...]:
    """The moments of a step, on the largest rank."""
    watched = _MomentReplay(priced)
    watched.run()
    seconds, held = seconds_by_moment(priced), watched.tops
    waits = dict(zip((Phase.FORWARD, Phase.BACKWARD), wait_seconds(priced), strict=True))
    found: list[Moment] = []
    nbytes = next(iter(held.values()), watched.heap.lately)
    for phase, place in _order(priced):
        if place is None:
            if waits[phase]:
                found.append(Moment(Phase.COPIES, None, waits[phase], nbytes))
            continue
        key = phase, place
        nbytes = held.get(key, nbytes)
        if key in held or seconds[key]:
            found.append(Moment(phase, place, seconds[key], nbytes))
    if priced.prices.training:
        cost = priced.cost
        found.append(Moment(Phase.SUMS, None, cost.exposed, watched.heap.lately, hidden=cost.hidden))
        found.append(Moment(Phase.OPTIMIZER, None, priced.cost.update, watched.heap.now))
    return tuple(found)


def seconds_by_moment(priced: PricedProgram) -> dict[Key, float]:
    """Seconds of a micro-batch by phase and operator, without those that hide; conversions are those of the
    first operator that takes them."""
    found = defaultdict[Key, float](float)
    weights = {item.name for item in priced.graph.inputs if item.kind is InputKind.PARAMETER}
    for place, price in enumerate(priced.operator_prices):
        found[Phase.FORWARD, place] += price.forward
        found[Phase.BACKWARD, place] += price.backward
    for value in priced.values.of.values():
        if value.move is None or value.leads:
            continue
        before, after = move_seconds(priced, value, name_is_weight=value.name in weights)
        place = priced.place_of(value)
        found[Phase.FORWARD, place] += before
        found[Phase.BACKWARD, place] += after
    for each in regathers(priced):
        found[Phase.BACKWARD, each.place] += each.seconds
    for place, _, again in repeated(priced):
        found[Phase.RECOMPUTE, place] += again
    for key, hidden in hidden_seconds(priced).items():
        found[key] = max(0.0, found[key] - hidden)
    return found


def _order(priced: PricedProgram) -> Iterator[tuple[Phase, int | None]]:
    """Go through phases and operators as they follow each other; None where a phase waits in the end."""
    count = len(priced.graph.operators)
    yield from ((Phase.FORWARD, place) for place in range(count))
    yield Phase.FORWARD, None
    if not priced.prices.training:
        return
    firsts = {stop: first for first, stop in priced.program.recompute}
    for stop in range(count, 0, -1):
        yield from ((Phase.RECOMPUTE, place) for place in range(firsts.get(stop, stop), stop))
        yield Phase.BACKWARD, stop - 1
    yield Phase.BACKWARD, None


class _WatchedHeap(Heap):
    """Also knows the most that it has held `lately`, since somebody looked."""

    def __init__(self) -> None:
        super().__init__()
        self.lately = 0

    def hold(self, key: Hashable, nbytes: int) -> None:
        super().hold(key, nbytes)
        self.lately = max(self.lately, self.now)


class _MomentReplay(Replay):
    """A replay that notes the most bytes of each moment."""

    heap: _WatchedHeap

    def __init__(self, priced: PricedProgram) -> None:
        super().__init__(priced)
        self.phase = Phase.FORWARD
        self.tops: dict[Key, int] = {}

    def new_heap(self) -> Heap:
        return _WatchedHeap()

    def note(self, place: int, scratch: int = 0) -> None:
        super().note(place, scratch)
        key = self.phase, min(place, len(self.graph.operators) - 1)
        self.tops[key] = max(self.tops.get(key, 0), self.heap.lately, self.heap.now + scratch)
        self.heap.lately = self.heap.now

    def backward(self) -> None:
        self.phase = Phase.BACKWARD
        super().backward()

    def second_time(self, part: RecomputedPart) -> None:
        self.phase = Phase.RECOMPUTE
        super().second_time(part)
        self.phase = Phase.BACKWARD
