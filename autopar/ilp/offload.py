"""What of a placed program waits for backward in the host's memory, so that it needs less on the device.

    hides      copies that forward and backward never wait for: of such a set every subset is one, too
    all        every copy that is more than its latency

Under a cap no more is taken of what hides than it takes to fit; the larger ones come first. If all of it
doesn't do, parts are computed again (recompute.py), with what hides of the rest moved, or without: whichever
fits and is faster. A tensor that a part takes or makes stays on the device. The exact replay of the step
(cost/memory.py) says what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.core.graph import Graph
from autopar.core.offload import Offload
from autopar.core.plan import Program
from autopar.core.recompute import Recompute
from autopar.cost.again import again_seconds
from autopar.cost.memory import peak_memory
from autopar.cost.offload import (
    Movable,
    backward_wait,
    clock,
    copy_seconds,
    forward_wait,
    movable,
    moved,
    wait_seconds,
)
from autopar.cost.prices import Prices
from autopar.ilp.recompute import Fitted, fit

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
    link = prices.cluster.host
    if link is None:
        return program
    times, room = clock(graph, prices, program), _Room(prices)
    chosen: list[Movable] = []
    for item in _worthwhile(graph, prices, program)[:MOST_TRIED]:
        trial = sorted([*chosen, item], key=_order)
        late = forward_wait(trial, times, link) > 0.0 or backward_wait(trial, times, link) > 0.0
        if not late and room.takes(item):
            chosen = trial
    return _moving(program, chosen)


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


class _Room:
    """What is left of a device's share of its node's memory. Pinned memory comes in powers of two."""

    def __init__(self, prices: Prices) -> None:
        cluster = prices.cluster
        self.left = None if cluster.host_memory is None else cluster.host_memory // cluster.devices_per_node

    def takes(self, item: Movable) -> bool:
        """Take room for a tensor, if there is so much."""
        nbytes = 1 << (item.nbytes - 1).bit_length()
        if self.left is None:
            return True
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True
