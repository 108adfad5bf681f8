"""Seconds of collectives between nodes whose links are laid in a known way.

    step        latency + (bytes of the most loaded link) / its rate
    algorithm   the sum of its steps
    sum         the least of all algorithms

What each link carries is counted, from all messages of a step. Of k of N nodes, such as those of a pipeline
stage, all N / k groups exchange at the same time. A group of L ranks on each node sums within the node first,
n/L bytes of each go through its own way out, and within the node they are gathered again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, assert_never

from autopar.core.costs import Collective, LinkLike
from autopar.core.topology import Topology
from autopar.cost.machine import collectives
from autopar.cost.topology.algorithms import SumAlgorithm, SumStep, Traffic, schedule_of
from autopar.cost.topology.graph import graph_of

MOST_LOADS = 1024  # of algorithms on topologies, that are remembered
Loads: TypeAlias = tuple[tuple[float, int], ...]  # parts of n on the most loaded link, and number of steps


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Ranks that exchange: `ranks` of them on each of `nodes` nodes, by links `intra` and `inter`."""

    topology: Topology
    nodes: int
    ranks: int
    intra: LinkLike
    inter: LinkLike


def seconds(kind: Collective, nbytes: float, group: NodeGroup) -> float:
    """Seconds of a collective over all ranks of a group; `nbytes` is the full tensor's, or one message's."""
    inside, size = group.intra, group.ranks
    between = _between(kind, nbytes if kind is Collective.SEND_RECV else nbytes / size, group)
    match kind:
        case Collective.ALL_REDUCE | Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return between + collectives.seconds(kind, nbytes, size, inside)
        case Collective.ALL_TO_ALL:
            return between + collectives.seconds(kind, nbytes / group.nodes, size, inside)
        case Collective.SEND_RECV:
            return between
        case _:
            assert_never(kind)


def _between(kind: Collective, nbytes: float, group: NodeGroup) -> float:
    """Seconds among nodes alone, of one rank's share."""
    if kind in (Collective.ALL_TO_ALL, Collective.SEND_RECV):
        shifts = shift_loads(group.topology, group.nodes, kind is Collective.ALL_TO_ALL)
        return loads_seconds(shifts, nbytes, group.inter)
    known = [loads for each in SumAlgorithm if (loads := loads_of(each, group.topology, group.nodes, kind))]
    return min(loads_seconds(loads, nbytes, group.inter) for loads in known)


def loads_seconds(loads: Loads, nbytes: float, link: LinkLike) -> float:
    """Seconds of steps by what their most loaded links carry."""
    return sum(count * link.seconds(load * nbytes) for load, count in loads)


@lru_cache(maxsize=MOST_LOADS)
def loads_of(
    algorithm: SumAlgorithm, topology: Topology, nodes: int, kind: Collective = Collective.ALL_REDUCE
) -> Loads | None:
    """Loads of the steps of a sum, or of its half; None where the algorithm has none such."""
    schedule = schedule_of(algorithm, nodes, topology)
    if schedule is None or not (kind is Collective.ALL_REDUCE or schedule.scattered):
        return None
    return _loads(_half(schedule.steps, schedule.scattered, kind), schedule.parts, topology, nodes)


def _half(steps: Sequence[SumStep], scattered: int, kind: Collective) -> list[Traffic]:
    halves = {Collective.REDUCE_SCATTER: slice(scattered), Collective.ALL_GATHER: slice(scattered, None)}
    return [step.traffic for step in steps[halves.get(kind, slice(None))]]


@lru_cache(maxsize=MOST_LOADS)
def shift_loads(topology: Topology, nodes: int, is_all_to_all: bool) -> Loads:
    """Loads of messages to the next node; or to all, one after the other, of 1/nodes^2 of all bytes each."""
    distances = range(1, nodes) if is_all_to_all else range(1, 2)
    steps = [tuple((rank, (rank + d) % nodes, 1) for rank in range(nodes)) for d in distances]
    return _loads(steps, nodes**2 if is_all_to_all else 1, topology, nodes)


def _loads(steps: Sequence[Traffic], parts: int, topology: Topology, nodes: int) -> Loads:
    graph, starts = graph_of(topology), range(0, topology.nodes, nodes)

    def load(traffic: Traffic) -> float:
        return graph.load(
            (start + sender, start + receiver, count / parts)
            for start in starts
            for sender, receiver, count in traffic
        )

    return tuple((load(traffic), count) for traffic, count in Counter(steps).items())
