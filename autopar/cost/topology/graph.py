"""A topology's links as a graph, and the load that messages put on them.

A message takes the shortest paths from its source to its target, and divides evenly over all of them, as
switches and routers spread packets over ways of equal length:

    0 - 1        from 0 to 3 half of a message goes by 1, half by 2
    |   |
    2 - 3

Each way of a link has a load of its own. Links that are several times as fast (`rate`) are loaded less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from typing import TypeAlias, assert_never

import networkx as nx

from autopar.core.topology import Topology, TopologyKind

MOST_GRAPHS = 16  # whose routes are remembered
Vertex: TypeAlias = "int | tuple[int, int]"  # a node's number; or a switch: its level and number
# Vertices before each one on shortest paths, numbers of these paths, and places in order of distance.
Route: TypeAlias = "tuple[dict[Vertex, list[Vertex]], dict[Vertex, int], dict[Vertex, int]]"
Message: TypeAlias = tuple[int, int, float]  # source, target, amount


class LinkGraph:
    """Links by topology, each way with its `rate`, and the shortest paths between nodes."""

    def __init__(self, topology: Topology) -> None:
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(range(topology.nodes))
        for first, second, rate in links_of(topology):
            self.graph.add_edge(first, second, rate=rate)
            self.graph.add_edge(second, first, rate=rate)
        self._routes: dict[int, Route] = {}

    def load(self, messages: Iterable[Message]) -> float:
        """The most that one link carries of messages that are sent at the same time, over its rate."""
        loads = self.loads(messages)
        return max((load / self.graph.edges[edge]["rate"] for edge, load in loads.items()), default=0.0)

    def loads(self, messages: Iterable[Message]) -> dict[tuple[Vertex, Vertex], float]:
        """What each way of each link carries."""
        by_source: dict[int, dict[Vertex, float]] = defaultdict(lambda: defaultdict(float))
        for source, target, amount in messages:
            by_source[source][target] += amount
        loads: dict[tuple[Vertex, Vertex], float] = defaultdict(float)
        for source, shares in by_source.items():
            before, ways, order = self._route(source)
            waiting = [(-order[vertex], vertex) for vertex in shares]
            heapify(waiting)
            while waiting:  # the furthest first: what it passes on is known by then
                _, vertex = heappop(waiting)
                for previous in before[vertex]:
                    part = shares[vertex] * ways[previous] / ways[vertex]
                    loads[previous, vertex] += part
                    if previous not in shares:
                        heappush(waiting, (-order[previous], previous))
                    shares[previous] += part
        return loads

    def _route(self, source: int) -> Route:
        if source not in self._routes:
            before = nx.predecessor(self.graph, source)  # in order of distance
            ways: dict[Vertex, int] = {source: 1}
            for vertex, previous in before.items():
                ways[vertex] = sum(ways[each] for each in previous) if previous else 1
            order = {vertex: place for place, vertex in enumerate(before)}
            self._routes[source] = before, ways, order
        return self._routes[source]


@lru_cache(maxsize=MOST_GRAPHS)
def graph_of(topology: Topology) -> LinkGraph:
    """The graph of a topology, once for all who ask."""
    return LinkGraph(topology)


def links_of(topology: Topology) -> Iterator[tuple[Vertex, Vertex, float]]:
    """The two ends of every link, and its rate."""
    match topology.kind:
        case TopologyKind.RING:
            yield from _strides(topology.nodes, (1,))
        case TopologyKind.LOOP:
            yield from _strides(topology.nodes, (1, *topology.shortcuts))
        case TopologyKind.TORUS:
            yield from _torus(topology.sizes)
        case TopologyKind.FAT_TREE:
            yield from _fat_tree(topology)
        case TopologyKind.SWITCH:
            yield from ((first, second, 1.0) for first, second in topology.circuits)
        case _:
            assert_never(topology.kind)


def _strides(nodes: int, strides: tuple[int, ...]) -> Iterator[tuple[Vertex, Vertex, float]]:
    for stride in strides:
        yield from ((node, (node + stride) % nodes, 1.0) for node in range(nodes) if nodes > 1)


def _torus(sizes: tuple[int, ...]) -> Iterator[tuple[Vertex, Vertex, float]]:
    for place in product(*map(range, sizes)):
        for dim, size in enumerate(sizes):
            if size > 1:
                further = (*place[:dim], (place[dim] + 1) % size, *place[dim + 1 :])
                yield _number(place, sizes), _number(further, sizes), 1.0


def _number(place: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """The number of a node at a place; the last dim's nodes follow each other."""
    return sum(index * math.prod(sizes[dim + 1 :]) for dim, index in enumerate(place))


def _fat_tree(topology: Topology) -> Iterator[tuple[Vertex, Vertex, float]]:
    below: list[list[Vertex]] = [list(range(topology.nodes))]
    for level, size in enumerate(topology.sizes):
        below.append([(level, number) for number in range(len(below[-1]) // size)])
    for level, (lower, upper) in enumerate(pairwise(below)):
        rate = math.prod(topology.sizes[:level]) / topology.oversubscription**level
        size = topology.sizes[level]
        yield from ((vertex, upper[place // size], rate) for place, vertex in enumerate(lower))
