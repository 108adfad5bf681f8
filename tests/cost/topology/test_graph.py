"""Links of topologies, and loads: by hand, and beside all shortest paths written out."""

from __future__ import annotations

import random
from collections import defaultdict

import networkx as nx
import pytest

from autopar.core.topology import Topology, TopologyKind
from autopar.cost.topology.graph import LinkGraph, links_of
from tests.cost.topology.topologies import every

SQUARE = Topology(TopologyKind.TORUS, 4, sizes=(2, 2))


@pytest.mark.parametrize("nodes", range(2, 10))
def test_loads_are_those_of_all_shortest_paths(nodes: int) -> None:
    draw = random.Random(nodes)
    for topology in every(nodes):
        graph = LinkGraph(topology)
        messages = [(*draw.sample(range(nodes), 2), float(draw.randint(1, 9))) for _ in range(2 * nodes)]
        wanted: dict[object, float] = defaultdict(float)
        for source, target, amount in messages:
            paths = list(nx.all_shortest_paths(graph.graph, source, target))
            for path in paths:
                for edge in nx.utils.pairwise(path):
                    wanted[edge] += amount / len(paths)
        assert graph.loads(messages) == pytest.approx(dict(wanted))


def test_a_message_divides_over_ways_of_equal_length() -> None:
    """0 and 3 are the opposite corners of a square."""
    graph = LinkGraph(SQUARE)
    assert graph.loads([(0, 3, 8.0)]) == {(1, 3): 4, (2, 3): 4, (0, 1): 4, (0, 2): 4}
    assert graph.load([(0, 3, 8.0), (0, 1, 8.0)]) == 12
    assert graph.load([]) == 0


def test_a_switchs_way_up_carries_all_its_nodes_or_a_part() -> None:
    def load(oversubscription: float) -> float:
        tree = Topology(TopologyKind.FAT_TREE, 8, sizes=(4, 2), oversubscription=oversubscription)
        return LinkGraph(tree).load([(node, node + 4, 1.0) for node in range(4)])

    assert (load(1.0), load(2.0), load(4.0)) == (1.0, 2.0, 4.0)


def test_levels_of_a_fat_tree_narrow_one_after_the_other() -> None:
    tree = Topology(TopologyKind.FAT_TREE, 8, sizes=(2, 2, 2), oversubscription=2.0)
    rates = defaultdict(list)
    for _, upper, rate in links_of(tree):
        rates[upper[0]].append(rate)  # type: ignore[index]
    assert rates == {0: [1.0] * 8, 1: [2 / 2] * 4, 2: [4 / 4] * 2}


@pytest.mark.parametrize(
    ("topology", "links"),
    [
        (Topology(TopologyKind.RING, 5), 5),
        (Topology(TopologyKind.RING, 2), 1),
        (Topology(TopologyKind.TORUS, 12, sizes=(3, 4)), 24),
        (Topology(TopologyKind.TORUS, 8, sizes=(2, 2, 2)), 12),
        (Topology(TopologyKind.LOOP, 8, shortcuts=(2, 4)), 8 + 8 + 4),
        (Topology(TopologyKind.SWITCH, 3, circuits=((0, 1), (1, 2))), 2),
    ],
)
def test_links_are_counted(topology: Topology, links: int) -> None:
    """Of rings of two, and shortcuts half around, the two ends have one link."""
    graph = LinkGraph(topology).graph
    assert graph.number_of_edges() == 2 * links
    assert nx.is_strongly_connected(graph)
