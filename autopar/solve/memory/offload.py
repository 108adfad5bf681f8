"""What of a placed program waits for backward in the host's memory, so that it needs less on the device.

    overlapped  copies that forward and backward never wait for: of such a set every subset is one, too
    all         every copy that is more than its latency

Under a cap no more is taken of the overlapped ones than it takes to fit; the larger come first. If all of
them don't do, parts are recomputed (recompute.py), with what is overlapped of the rest offloaded, or without:
whichever fits and is faster. A tensor that a part takes or makes stays on the device. The exact replay of the
step (cost/program/peak_memory.py) says what fits.

A pipeline stage offloads what it makes and reads itself, and what its own forward and backward overlap.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.core.offload import Offload, OffloadedTensor
from autopar.core.recompute import Recompute
from autopar.core.schedule import Schedule
from autopar.cost.operators.prices import Prices
from autopar.cost.program.offload import (
    Clock,
    Movable,
    backward_wait,
    clock,
    copy_seconds,
    forward_wait,
    movable,
    offloaded,
    wait_seconds,
)
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.recompute import recompute_seconds
from autopar.schedules.in_flight import flight
from autopar.solve.memory.recompute import FittedProgram, fit

MOST_TRIED = 500  # tensors, the largest: the time that it takes to choose grows with the square


def fit_by_offload(
    priced: PricedProgram, cap: int, *, recompute: Recompute, offload: Offload
) -> FittedProgram:
    """Recomputes parts and moves tensors so that the program fits `cap` bytes per device at least expense.
    Only what is free to be chosen is chosen; where nothing fits, what needs least."""
    plain = fitted(priced)
    if plain.peak.nbytes <= cap:
        return plain
    found, starts = [plain], [priced]
    if offload is Offload.AUTO and (all_overlapped := overlapped(priced)).program.offload:
        hidden = fitted(all_overlapped)
        if hidden.peak.nbytes <= cap:
            return fewest(hidden, cap)
        found.append(hidden)
        starts.append(all_overlapped)
    if recompute is Recompute.AUTO:
        found += [fitted(fit(each, cap).priced) for each in starts]
    return min(found, key=lambda each: (max(0, each.peak.nbytes - cap), each.seconds, each.peak.nbytes))


def fitted(priced: PricedProgram) -> FittedProgram:
    """The program, moving only what its parts that are recomputed leave, and what that takes."""
    priced = _moving(priced, offloaded(priced))
    return FittedProgram(priced, recompute_seconds(priced) + sum(wait_seconds(priced)))


def offload_everything(priced: PricedProgram) -> PricedProgram:
    """The program with everything offloaded that is worth a copy and finds room on the host."""
    room, chosen = _Room(priced.prices), []
    for item in _worthwhile(priced):
        if room.takes(item):
            chosen.append(item)
    return _moving(priced, chosen)


def overlapped(priced: PricedProgram) -> PricedProgram:
    """Offloads as much as neither forward nor backward waits for, and the host has room for."""
    items, times = _worthwhile(priced), clock(priced)
    return _moving(priced, _hidden(items, times, _Room(priced.prices)))


def overlapped_of_stages(priced: PricedProgram) -> PricedProgram:
    """Offloads as much as is overlapped if the program runs as a whole, of what one stage makes: how much of
    it a stage offloads depends on the stage."""
    free = priced.values.free
    items = [item for item in _worthwhile(priced) if item.tensor[0] not in free]
    return _moving(priced, _hidden(items, clock(priced), _Room(priced.prices, copies=0)))


def moving_in_stages(
    priced: PricedProgram,
    offloadable: Sequence[Container[OffloadedTensor]],
    *,
    starts: Sequence[int],
    schedule: Schedule,
    most: int | None = None,
) -> PricedProgram:
    """Offloads as much as is overlapped in each stage of the program cut at `starts`. Of what an operator
    makes only what is `offloadable` is taken, as far as the host has room for all micro-batches in flight;
    or the `most` largest of that."""
    places = range(len(priced.graph.operators))
    items = [
        item
        for item in _worthwhile(priced)
        if item.maker in places and item.tensor in offloadable[item.maker]
    ]
    times, chosen = clock(priced), list[Movable]()
    rooms = [_Room(priced.prices) for _ in range(schedule.ranks)]
    for stage, (start, stop) in enumerate(pairwise((*starts, len(priced.graph.operators)))):
        own = [item for item in items if start <= item.maker and item.needed <= stop]
        room = replace(rooms[schedule.rank_of(stage)], copies=flight(schedule, stage))
        chosen += _hidden(own, times.within(start, stop), room)
        rooms[schedule.rank_of(stage)] = room
    return _moving(priced, sorted(chosen, key=lambda item: -item.nbytes)[:most])


def fewest(found: FittedProgram, cap: int) -> FittedProgram:
    """Offload as few tensors, the largest, as still fit."""
    items = sorted(offloaded(found.priced), key=lambda item: -item.nbytes)
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        trial = fitted(_moving(found.priced, items[:middle]))
        if trial.peak.nbytes <= cap:
            high, found = middle, trial
        else:
            low = middle
    return found


def _hidden(items: Sequence[Movable], times: Clock, room: _Room) -> list[Movable]:
    """The most of `items`, largest first, whose copies neither forward nor backward waits for."""
    link, chosen = room.prices.cluster.host, list[Movable]()
    if link is None:
        return chosen
    for item in items[:MOST_TRIED]:
        trial = sorted([*chosen, item], key=_order)
        late = forward_wait(trial, times, link) > 0.0 or backward_wait(trial, times, link) > 0.0
        if not late and room.takes(item):
            chosen = trial
    return chosen


def _worthwhile(priced: PricedProgram) -> list[Movable]:
    """Tensors that may be offloaded and whose copies take at least twice a link's latency; the largest
    first."""
    link = priced.prices.cluster.host
    if link is None:
        return []
    items = [item for item in movable(priced) if copy_seconds(item, link) >= 2 * link.latency]
    return sorted(items, key=lambda item: -item.nbytes)


def _moving(priced: PricedProgram, items: Sequence[Movable]) -> PricedProgram:
    """The program that moves these, in the order in which they can be needed."""
    return priced.remedied(offload=tuple(item.tensor for item in sorted(items, key=_order)))


def _order(item: Movable) -> tuple[int, int]:
    return item.read, item.call


@dataclass
class _Room:
    """A device's share of its node's memory, for so many `copies` of each tensor. Pinned memory comes in
    powers of two."""

    prices: Prices
    copies: int = 1
    taken: int = 0

    def takes(self, item: Movable) -> bool:
        """Take room for a tensor, if there is so much."""
        cluster = self.prices.cluster
        nbytes = self.copies * (1 << (item.nbytes - 1).bit_length())
        if cluster.host_memory is not None:
            if self.taken + nbytes > cluster.host_memory // cluster.devices_per_node:
                return False
            self.taken += nbytes
        return True
