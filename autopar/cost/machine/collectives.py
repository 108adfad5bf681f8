"""Seconds of a collective: closed forms, and measured points between which they are interpolated.

    alpha   the link's latency, seconds per message
    beta    1 / the link's bandwidth, seconds per byte
    P       ranks in the group
    n       bytes of the FULL tensor: gathered, before reduce-scatter; every rank holds n/P of it
            before an all-to-all

| collective     | ring                               |
|----------------|------------------------------------|
| all-reduce     | 2 (P - 1) alpha + 2 (P - 1)/P n beta |
| all-gather     | (P - 1) alpha + (P - 1)/P n beta     |
| reduce-scatter | (P - 1) alpha + (P - 1)/P n beta     |
| all-to-all     | (P - 1) alpha + (P - 1)/P n/P beta   |
| send, receive  | alpha + n beta, one message of n     |

Source: Thakur, Rabenseifner and Gropp, 2005.

Of a link with measured points a step of a ring is one message of theirs.
On known GPUs nccl.py has forms of its own. Processes on CPUs also pack, unpack and add, which takes them as
long as sending: `copied`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TypeAlias, assert_never

from autopar.core.costs import Collective, CollectiveCost, LinkLike
from costdb.measurement import CollectiveMeasurement

Point: TypeAlias = tuple[int, float]  # bytes of the full tensor, seconds
Series: TypeAlias = tuple[Collective, int, int]  # kind, ranks, nodes spanned


def seconds(kind: Collective, nbytes: float, size: int, link: LinkLike) -> float:
    """Seconds for one collective over `size` ranks; 0 within one rank.

    `nbytes` is the size of the full (gathered) tensor, of the message for send and receive.
    """
    if size == 1:
        return 0.0
    match kind:
        case Collective.ALL_REDUCE:
            return all_reduce(nbytes, size, link)
        case Collective.ALL_GATHER:
            return all_gather(nbytes, size, link)
        case Collective.REDUCE_SCATTER:
            return reduce_scatter(nbytes, size, link)
        case Collective.ALL_TO_ALL:
            return all_to_all(nbytes, size, link)
        case Collective.SEND_RECV:
            return send_recv(nbytes, link)
        case _:
            assert_never(kind)


def all_reduce(nbytes: float, size: int, link: LinkLike) -> float:
    """Seconds of a reduce-scatter and an all-gather. `nbytes` is the tensor's size, the same on every
    rank."""
    return reduce_scatter(nbytes, size, link) + all_gather(nbytes, size, link)


def all_gather(nbytes: float, size: int, link: LinkLike) -> float:
    """(P - 1) alpha + (P - 1)/P n beta; `nbytes` is the size of the gathered tensor, not of a shard."""
    return (size - 1) * link.seconds(nbytes / size)


def reduce_scatter(nbytes: float, size: int, link: LinkLike) -> float:
    """(P - 1) alpha + (P - 1)/P n beta; `nbytes` is the size before scattering, not of a shard."""
    return (size - 1) * link.seconds(nbytes / size)


def all_to_all(nbytes: float, size: int, link: LinkLike) -> float:
    """(P - 1) alpha + (P - 1)/P n/P beta; `nbytes` is the full tensor, of which a rank holds 1/P."""
    return (size - 1) * link.seconds(nbytes / size**2)


def send_recv(nbytes: float, link: LinkLike) -> float:
    """Seconds for one message to a neighbour, a halo or a pipeline hop: alpha + nbytes beta."""
    return link.seconds(nbytes)


def copied(kind: Collective, nbytes: int, size: int) -> float:
    """Bytes that a rank reads and writes beside what it sends, `nbytes` as in `seconds`.

    Parts of a tensor lie apart in it: they are packed, pass through the sockets' buffers, and are laid in
    their places or added. The counts are what two gloo processes were seen to take for 2 and 16 MB, in
    terms of a plain copy's rate.
    """
    match kind:
        case Collective.ALL_REDUCE:
            return 6 * nbytes
        case Collective.ALL_GATHER:
            return 4 * nbytes
        case Collective.REDUCE_SCATTER:
            return 8 * nbytes
        case Collective.ALL_TO_ALL:
            return 8 * nbytes / size
        case Collective.SEND_RECV:
            return 0
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Measured points, sorted by size, for each kind, group size and number of nodes spanned; `measured_at`
    is when the last of them was, as the database writes it."""

    points: dict[Series, tuple[Point, ...]]
    measured_at: str = ""

    @staticmethod
    def of(measurements: Iterable[CollectiveMeasurement], backend: str) -> CollectiveTable:
        """The table of one backend's measurements; points of one size become their median.

        No message takes longer than a larger one: where it was measured so, the machine was busy.
        """
        found: dict[Series, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        last = ""
        for each in measurements:
            if each.backend == backend:
                found[each.kind, each.size, each.nodes][each.nbytes].append(each.seconds)
                last = max(last, each.measured_at)
        return CollectiveTable(
            {
                series: _rising([(nbytes, median(times)) for nbytes, times in sorted(by_size.items())])
                for series, by_size in found.items()
            },
            last,
        )

    def cost(
        self,
        kind: Collective,
        nbytes: int,
        size: int,
        link: LinkLike,
        *,
        nodes: int = 1,
        copy_rate: float = math.inf,
        estimate: float | None = None,
    ) -> CollectiveCost:
        """The measured cost between measured points, else an `estimate`, or the closed form. In that a rank
        copies `copy_rate` bytes per second; both marked.

        Below the smallest point the latency rules, so its time is an estimate from above; beyond the
        largest the bandwidth rules, so its time grows in proportion. Both count as estimates.
        """
        points = self.points.get((kind, size, nodes), ())
        if size == 1:
            return CollectiveCost(0.0, measured=False)
        if not points and estimate is not None:
            return CollectiveCost(estimate, measured=False)
        if not points:
            copying = copied(kind, nbytes, size) / copy_rate
            return CollectiveCost(seconds(kind, nbytes, size, link) + copying, measured=False)
        (least, fastest), (most, slowest) = points[0], points[-1]
        if nbytes < least:
            return CollectiveCost(fastest, measured=False)
        if nbytes > most:
            return CollectiveCost(slowest * nbytes / most, measured=False)
        return CollectiveCost(_interpolate(points, nbytes), measured=True)

    def line(self, kind: Collective, *, size: int, nodes: int) -> tuple[float, float] | None:
        """Seconds of the smallest measured message, and bytes per second from it to the largest; None
        where fewer than two sizes, or no growth, was measured."""
        points = self.points.get((kind, size, nodes), ())
        if len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        (least, fastest), (most, slowest) = points[0], points[-1]
        return fastest, (most - least) / (slowest - fastest)

    def message(self, *, nodes: int) -> tuple[float, float] | None:
        """The line of messages between two ranks on so many nodes, from the smallest measured group."""
        sizes = sorted(
            size for kind, size, span in self.points if (kind, span) == (Collective.SEND_RECV, nodes)
        )
        return self.line(Collective.SEND_RECV, size=sizes[0], nodes=nodes) if sizes else None


def _rising(points: list[Point]) -> tuple[Point, ...]:
    """Each time at most that of the next larger size."""
    least = list(accumulate((seconds for _, seconds in reversed(points)), min))
    return tuple((nbytes, time) for (nbytes, _), time in zip(points, reversed(least), strict=True))


def _interpolate(points: tuple[Point, ...], nbytes: int) -> float:
    """A straight line in log seconds over log bytes between the two points around `nbytes`."""
    above = bisect_left(points, (nbytes, -math.inf))
    right, seconds_right = points[above]
    if right == nbytes:
        return seconds_right
    left, seconds_left = points[above - 1]
    share = math.log(nbytes / left) / math.log(right / left)
    return float(seconds_left ** (1 - share) * seconds_right**share)
