"""Seconds of NCCL's collectives, by size: ring or tree, under the protocol that is fastest.

    n ranks on `nodes` nodes, b bytes of the full tensor, B bytes/s

    ring    all-reduce          base + 2(n - 1) hops, 2 nodes of them far   + 2(n - 1)/n b / B
            all-gather and      base + (n - 1) hops, nodes - 1 far          +  (n - 1)/n b / B
            reduce-scatter
    tree    all-reduce          base + 2(n/nodes - 1 hops, log2(nodes) far) + 2 b / (0.92 B)

B is what a rank gets through the slowest part of the way: its links within the node or, for a group on
several nodes, the network cards of all its ranks on one node together. A protocol of small messages (LL,
LL128) has lower latencies and a part of the bandwidth. A link whose latency is known to be higher counts so.
How many groups talk at once makes no difference but for the cards: each device has its own.

Source: NCCL 2.30, src/graph/tuning.cc.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from autopar.core.costs import Collective, LinkLike

MICRO = 1e-6
TREE_PART = 0.92  # of the bandwidth
MOST_GROUPS = 1024  # whose algorithms are remembered
SIMPLE_FAR = 1.4  # times the latency of rings over several nodes, without a low-latency protocol


@dataclass(frozen=True, slots=True)
class Protocol:
    """Latencies in microseconds: at the start, and of a hop within a node and between nodes, each of a ring
    and of a tree; and the part of the bandwidth that is left."""

    base: tuple[float, float]
    near: tuple[float, float]
    far: tuple[float, float]
    part: float
    slow_far: float = 1.0


LL = Protocol(base=(6.6, 6.8), near=(0.6, 0.6), far=(2.7, 5.0), part=0.5)
LL128 = Protocol(base=(14.0, 14.0), near=(1.9, 1.25), far=(4.0, 8.5), part=0.92)
SIMPLE = Protocol(base=(8.4, 8.4), near=(3.4, 4.0), far=(14.0, 14.0), part=1.0, slow_far=SIMPLE_FAR)
PROTOCOLS = (LL, LL128, SIMPLE)
RING, TREE = 0, 1


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that communicate, evenly spread over `nodes`; `inter` is each device's link out of its node."""

    size: int
    nodes: int
    intra: LinkLike
    inter: LinkLike | None

    @property
    def bandwidth(self) -> float:
        """Bytes per second through the slowest link of the path."""
        if self.nodes == 1 or self.inter is None:
            return self.intra.bandwidth
        way_out = self.size / self.nodes * self.inter.bandwidth
        return way_out if self.size == self.nodes else min(self.intra.bandwidth, way_out)

    def hops(self, near: float, far: float, latencies: tuple[float, float]) -> float:
        """Seconds of hops within a node and between nodes, of `latencies` microseconds each at least."""
        inter = self.inter.latency if self.inter else 0.0
        within, between = (MICRO * each for each in latencies)
        return near * max(within, self.intra.latency) + far * max(between, inter)


@dataclass(frozen=True, slots=True)
class TransferLine:
    """Seconds by bytes: `latency + share * nbytes / bandwidth`."""

    latency: float
    share: float
    bandwidth: float

    def at(self, nbytes: int) -> float:
        return self.latency + self.share * nbytes / self.bandwidth


def seconds(kind: Collective, nbytes: int, group: RankGroup) -> float | None:
    """Seconds of a collective, `nbytes` of the full tensor; None for kinds that NCCL makes of messages."""
    if kind not in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        return None
    if group.size == 1:
        return 0.0
    return min(line.at(nbytes) for line in lines(kind, group))


@lru_cache(maxsize=MOST_GROUPS)
def lines(kind: Collective, group: RankGroup) -> tuple[TransferLine, ...]:
    """Transfer times of a collective, one for each algorithm and protocol."""
    found = [ring(kind, group, protocol) for protocol in PROTOCOLS]
    if kind is Collective.ALL_REDUCE:
        found += [tree(group, protocol) for protocol in PROTOCOLS]
    return tuple(found)


def ring(kind: Collective, group: RankGroup, protocol: Protocol) -> TransferLine:
    """One ring through all ranks, or the two passes of an all-reduce."""
    whole = kind is Collective.ALL_REDUCE
    steps = (group.size - 1) * (2 if whole else 1)
    several = group.nodes > 1
    far = (2 * group.nodes if whole else group.nodes - 1) if several else 0
    far = min(far, steps)
    latency = MICRO * protocol.base[RING]
    latency += group.hops(steps - far, far, (protocol.near[RING], protocol.far[RING]))
    latency *= protocol.slow_far if several else 1.0
    return TransferLine(latency, steps / group.size, group.bandwidth * protocol.part)


def tree(group: RankGroup, protocol: Protocol) -> TransferLine:
    """Up and down a tree of nodes, each a chain of its ranks."""
    near, far = group.size / group.nodes - 1, math.log2(group.nodes)
    latency = MICRO * protocol.base[TREE]
    latency += 2 * group.hops(near, far, (protocol.near[TREE], protocol.far[TREE]))
    return TransferLine(latency, 2, group.bandwidth * TREE_PART * protocol.part)
