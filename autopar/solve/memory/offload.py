"""What of a placed program waits for backward in the host's memory, so that it needs less on the device.

    hides      copies that forward and backward never wait for: of such a set every subset is one, too
    all        every copy that is more than its latency

Under a cap no more is taken of what hides than it takes to fit; the larger ones come first. If all of it
doesn't do, parts are computed again (recompute.py), with what hides of the rest moved, or without: whichever
fits and is faster. A tensor that a part takes or makes stays on the device. The exact replay of the step
(cost/program/peak_memory.py) says what fits.

A pipeline stage moves what it makes and reads itself, and what hides in its own forward and backward.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.core.graph import Graph
from autopar.core.offload import Moved, Offload
from autopar.core.program import Program
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
    moved,
    wait_seconds,
)
from autopar.cost.program.peak_memory import peak_memory
from autopar.cost.program.recompute import again_seconds
from autopar.cost.program.values import find_values
from autopar.schedules.in_flight import flight
from autopar.solve.memory.recompute import Fitted, fit

MOST_TRIED = 500  # tensors, the largest: the time that it takes to choose grows with the square


def spare(
    graph: Graph,
    prices: Prices,
    program: Program,
    cap: int,
    *,
    recompute: Recompute,
    offload: Offload,
) -> Fitted:
    """`program` with the parts computed again, and the tensors moved, that make it fit `cap` bytes per device
    at least expense, as far as these are free; if none do, with those that need least."""
    plain = fitted(graph, prices, program)
    if plain.peak.nbytes <= cap:
        return plain
    found = [plain]
    if recompute is Recompute.AUTO:
        found.append(fitted(graph, prices, fit(graph, prices, program, cap).program))
    if offload is Offload.AUTO and (away := hiding(graph, prices, program)).offload:
        hidden = fitted(graph, prices, away)
        if hidden.peak.nbytes <= cap:
            return fewest(graph, prices, hidden, cap)
        found.append(hidden)
        if recompute is Recompute.AUTO:
            found.append(fitted(graph, prices, fit(graph, prices, away, cap).program))
    return min(found, key=lambda each: (max(0, each.peak.nbytes - cap), each.seconds, each.peak.nbytes))


def fitted(graph: Graph, prices: Prices, program: Program) -> Fitted:
    """The program, moving only what its parts that are computed again leave, and what that takes."""
    program = _moving(program, moved(graph, prices, program))
    seconds = again_seconds(graph, prices, program) + sum(wait_seconds(graph, prices, program))
    return Fitted(program, seconds, peak_memory(graph, prices, program))


def everywhere(graph: Graph, prices: Prices, program: Program) -> Program:
    """`program` with everything moved that is worth a copy and finds room on the host."""
    room, chosen = _Room(prices), []
    for item in _worthwhile(graph, prices, program):
        if room.takes(item):
            chosen.append(item)
    return _moving(program, chosen)


def hiding(graph: Graph, prices: Prices, program: Program) -> Program:
    """`program` with as much moved as neither forward nor backward waits for, and finds room on the host."""
    items, times = _worthwhile(graph, prices, program), clock(graph, prices, program)
    return _moving(program, _hidden(prices, items, times, _Room(prices)))


def hiding_of_stages(graph: Graph, prices: Prices, program: Program) -> Program:
    """`program` with as much moved as hides if it runs as a whole, of what one stage makes: how much of it a
    stage moves depends on the stage."""
    free = find_values(graph, program, training=prices.training).free
    items = [item for item in _worthwhile(graph, prices, program) if item.moved[0] not in free]
    return _moving(program, _hidden(prices, items, clock(graph, prices, program), _Room(prices, copies=0)))


def moving_in_stages(
    graph: Graph,
    prices: Prices,
    program: Program,
    away: Sequence[Container[Moved]],
    *,
    starts: Sequence[int],
    schedule: Schedule,
    most: int | None = None,
) -> Program:
    """`program` cut at `starts`, with as much moved of what each operator makes and has in `away` as hides in
    its stage and finds room on the host for all micro-batches in flight; or the `most` largest of that."""
    places = range(len(graph.operators))
    items = [
        item
        for item in _worthwhile(graph, prices, program)
        if item.home in places and item.moved in away[item.home]
    ]
    times, chosen = clock(graph, prices, program), list[Movable]()
    rooms = [_Room(prices) for _ in range(schedule.ranks)]
    for stage, (start, stop) in enumerate(pairwise((*starts, len(graph.operators)))):
        own = [item for item in items if start <= item.home and item.needed <= stop]
        room = replace(rooms[schedule.rank_of(stage)], copies=flight(schedule, stage))
        chosen += _hidden(prices, own, times.within(start, stop), room)
        rooms[schedule.rank_of(stage)] = room
    return _moving(program, sorted(chosen, key=lambda item: -item.nbytes)[:most])


def fewest(graph: Graph, prices: Prices, found: Fitted, cap: int) -> Fitted:
    """The same with as few tensors moved, the largest, as still fit."""
    items = sorted(moved(graph, prices, found.program), key=lambda item: -item.nbytes)
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        trial = fitted(graph, prices, _moving(found.program, items[:middle]))
        if trial.peak.nbytes <= cap:
            high, found = middle, trial
        else:
            low = middle
    return found


def _hidden(prices: Prices, items: Sequence[Movable], times: Clock, room: _Room) -> list[Movable]:
    """As many of `items`, which begin with the largest, as neither forward nor backward waits for."""
    link, chosen = prices.cluster.host, list[Movable]()
    if link is None:
        return chosen
    for item in items[:MOST_TRIED]:
        trial = sorted([*chosen, item], key=_order)
        late = forward_wait(trial, times, link) > 0.0 or backward_wait(trial, times, link) > 0.0
        if not late and room.takes(item):
            chosen = trial
    return chosen


def _worthwhile(graph: Graph, prices: Prices, program: Program) -> list[Movable]:
    """What may be moved and takes longer to copy than a copy of nothing, twice; the largest first."""
    link = prices.cluster.host
    if link is None:
        return []
    items = [item for item in movable(graph, prices, program) if copy_seconds(item, link) >= 2 * link.latency]
    return sorted(items, key=lambda item: -item.nbytes)


def _moving(program: Program, items: Sequence[Movable]) -> Program:
    """The program that moves these, in the order in which they can be needed."""
    return replace(program, offload=tuple(item.moved for item in sorted(items, key=_order)))


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
