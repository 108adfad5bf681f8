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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias, assert_never

from autopar.cluster import ClusterSpec
from autopar.core.costs import Collective, LinkLike
from autopar.core.sum_schedules import SumAlgorithm, SumSchedule, Traffic, schedule_of
from autopar.core.topology import Topology
from autopar.cost.machine import collectives
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
    if kind is Collective.SEND_RECV:
        return group.inter.seconds(neighbour_load(group.topology, group.nodes) * nbytes)
    if kind is Collective.ALL_TO_ALL:  # a scatter to all of nbytes / nodes, with a latency for each message
        at_once = loads_of(SumAlgorithm.FULL, group.topology, group.nodes, Collective.REDUCE_SCATTER) or ()
        waits = (group.nodes - 2) * group.inter.latency
        return loads_seconds(at_once, nbytes / group.nodes, group.inter) + waits
    known = [loads for each in SumAlgorithm if (loads := loads_of(each, group.topology, group.nodes, kind))]
    return min(loads_seconds(loads, nbytes, group.inter) for loads in known)


def chosen_sums(cluster: ClusterSpec) -> Callable[[tuple[int, ...], int], SumSchedule | None] | None:
    """What says by which steps ranks of the world best sum bytes; None where no topology is known."""
    if cluster.topology is None or cluster.inter is None or cluster.device_type != "cpu":
        return None
    return partial(best_steps, cluster.topology, cluster.inter, cluster.devices_per_node)


def best_steps(
    topology: Topology, link: LinkLike, per_node: int, ranks: tuple[int, ...], nbytes: int
) -> SumSchedule | None:
    """The cheapest steps of a sum over `ranks`, one on each of a run of nodes; None for other ranks."""
    nodes, first = len(ranks), ranks[0] // per_node
    if nodes < 2 or topology.nodes % nodes or first % nodes:
        return None
    if [rank // per_node for rank in ranks] != list(range(first, first + nodes)):
        return None
    known = {each: loads for each in SumAlgorithm if (loads := loads_of(each, topology, nodes))}
    return schedule_of(min(known, key=lambda each: loads_seconds(known[each], nbytes, link)), nodes, topology)


def loads_seconds(loads: Loads, nbytes: float, link: LinkLike) -> float:
    """Seconds of steps by what their most loaded links carry."""
    return sum(count * link.seconds(load * nbytes) for load, count in loads)


@lru_cache(maxsize=MOST_LOADS)
def loads_of(
    algorithm: SumAlgorithm, topology: Topology, nodes: int, kind: Collective = Collective.ALL_REDUCE
) -> Loads | None:
    """Loads of the steps of a sum, or of its half; None where the algorithm has none such."""
    found = _step_loads(algorithm, topology, nodes)
    if found is None or not (kind is Collective.ALL_REDUCE or found[1]):
        return None
    loads, scattered = found
    halves = {Collective.REDUCE_SCATTER: slice(scattered), Collective.ALL_GATHER: slice(scattered, None)}
    return tuple(Counter(loads[halves.get(kind, slice(None))]).items())


@lru_cache(maxsize=MOST_LOADS)
def _step_loads(
    algorithm: SumAlgorithm, topology: Topology, nodes: int
) -> tuple[tuple[float, ...], int] | None:
    """The load of each step, and after how many of them the sum is scattered."""
    schedule = schedule_of(algorithm, nodes, topology)
    if schedule is None:
        return None
    known = {
        traffic: _load(traffic, schedule.parts, topology, nodes)
        for traffic in {step.traffic for step in schedule.steps}
    }
    return tuple(known[step.traffic] for step in schedule.steps), schedule.scattered


@lru_cache(maxsize=MOST_LOADS)
def neighbour_load(topology: Topology, nodes: int) -> float:
    """The load of a message from each node to the next one."""
    return _load(tuple((rank, (rank + 1) % nodes, 1) for rank in range(nodes)), 1, topology, nodes)


def _load(traffic: Traffic, parts: int, topology: Topology, nodes: int) -> float:
    """The most that a link carries of one step, in parts of n; all groups of nodes send."""
    return graph_of(topology).load(
        (start + sender, start + receiver, count / parts)
        for start in range(0, topology.nodes, nodes)
        for sender, receiver, count in traffic
    )
