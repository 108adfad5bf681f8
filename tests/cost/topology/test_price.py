"""Seconds on topologies by hand: latency 1 s, 1 byte/s."""

from __future__ import annotations

import pytest

from autopar.cluster import Link
from autopar.core.costs import Collective
from autopar.core.sum_schedules import SumAlgorithm
from autopar.core.topology import Topology, TopologyKind
from autopar.cost.machine import collectives
from autopar.cost.topology.price import NodeGroup, loads_of, loads_seconds, seconds
from tests.cost.topology.topologies import every

SLOW = Link(1.0, 1.0)
FREE = Link(0.0, 1e30)
RING_8, LOOP_8 = Topology(TopologyKind.RING, 8), Topology(TopologyKind.LOOP, 8, shortcuts=(2, 4))
WIDE = Topology(TopologyKind.FAT_TREE, 8, sizes=(8,))


def takes(algorithm: SumAlgorithm, topology: Topology, nbytes: float, link: Link = SLOW) -> float:
    loads = loads_of(algorithm, topology, topology.nodes)
    assert loads is not None
    return loads_seconds(loads, nbytes, link)


def test_a_ring_on_a_ring_is_the_formula() -> None:
    """2 (P - 1) (alpha + n/P beta): one message on each link at a time."""
    assert takes(SumAlgorithm.RING, RING_8, 80) == 2 * 7 * (1 + 10)
    assert takes(SumAlgorithm.RING, WIDE, 80) == 2 * 7 * (1 + 10)


def test_halving_on_a_ring_contends_and_on_one_switch_does_not() -> None:
    """Distance 4: half the bytes, both ways around, each link under 2 of them; distance 2: two messages of a
    quarter; distance 1: one of an eighth."""
    assert takes(SumAlgorithm.HALVING, WIDE, 80) == 2 * (3 + 40 + 20 + 10)
    assert takes(SumAlgorithm.HALVING, RING_8, 80) == 2 * (3 + 2 * 40 + 2 * 20 + 10)


def test_shifts_on_a_loop_take_one_hop_each() -> None:
    """Shortcuts of 2 and 4 lead where distances of 2 and 4 do: no two messages share a link."""
    assert takes(SumAlgorithm.SHIFTED, LOOP_8, 80) == 2 * (3 + 40 + 20 + 10)
    assert takes(SumAlgorithm.SHIFTED, RING_8, 80) > takes(SumAlgorithm.SHIFTED, LOOP_8, 80)


def test_a_tree_and_all_at_once_by_hand() -> None:
    assert takes(SumAlgorithm.TREE, WIDE, 80) == 2 * 3 * (1 + 80)
    assert takes(SumAlgorithm.FULL, WIDE, 80) == 2 * (1 + 7 * 10)


def test_a_hierarchical_sum_keeps_within_rows_then_columns() -> None:
    torus = Topology(TopologyKind.TORUS, 16, sizes=(4, 4))
    assert takes(SumAlgorithm.HIERARCHICAL, torus, 160) == 2 * (3 * (1 + 40) + 3 * (1 + 10))


def test_the_best_algorithm_is_taken_by_size() -> None:
    """Few bytes in few steps, many bytes without contention."""
    group = NodeGroup(RING_8, 8, 1, FREE, SLOW)
    few, many = seconds(Collective.ALL_REDUCE, 0, group), seconds(Collective.ALL_REDUCE, 8000, group)
    assert few == 2 and many == takes(SumAlgorithm.RING, RING_8, 8000)


@pytest.mark.parametrize("nodes", range(2, 10))
@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
def test_halves_of_a_sum_take_no_longer_than_it(kind: Collective, nodes: int) -> None:
    for topology in every(nodes):
        group = NodeGroup(topology, nodes, 1, FREE, SLOW)
        assert 0 < seconds(kind, 1000, group) < seconds(Collective.ALL_REDUCE, 1000, group)


def test_on_one_switch_exchanges_are_the_closed_forms() -> None:
    group = NodeGroup(WIDE, 8, 1, FREE, SLOW)
    for kind in (Collective.ALL_TO_ALL, Collective.SEND_RECV):
        assert seconds(kind, 640, group) == pytest.approx(collectives.seconds(kind, 640, 8, SLOW))


def test_ranks_of_a_node_sum_within_it_first_and_share_what_leaves() -> None:
    """4 ranks on each of 8 nodes: 3 (1 + 20) twice inside, and n/4 by each way out."""
    group = NodeGroup(RING_8, 8, 4, SLOW, Link(0.0, 1.0))
    between = takes(SumAlgorithm.RING, RING_8, 20, Link(0.0, 1.0))
    assert seconds(Collective.ALL_REDUCE, 80, group) == 2 * 3 * (1 + 20) + between
    inside = collectives.all_to_all(10, 4, SLOW)
    alone = seconds(Collective.ALL_TO_ALL, 20, NodeGroup(RING_8, 8, 1, FREE, Link(0.0, 1.0)))
    assert seconds(Collective.ALL_TO_ALL, 80, group) == pytest.approx(inside + alone)


def test_parts_of_the_nodes_exchange_at_the_same_time() -> None:
    """Two stages of four nodes on one ring: each ring of four closes by three links, under its other
    messages."""
    parts = loads_of(SumAlgorithm.RING, RING_8, 4)
    alone = loads_of(SumAlgorithm.RING, Topology(TopologyKind.RING, 4), 4)
    assert parts is not None and alone is not None
    assert loads_seconds(alone, 4.0, Link(0.0, 1.0)) == 6
    assert loads_seconds(parts, 4.0, Link(0.0, 1.0)) == 6  # the way back has links of its own
    narrow = Topology(TopologyKind.FAT_TREE, 8, sizes=(2, 4), oversubscription=2.0)
    pairs, quads = loads_of(SumAlgorithm.RING, narrow, 2), loads_of(SumAlgorithm.RING, narrow, 4)
    assert pairs == ((0.5, 2),) and quads == ((0.25, 6),)


def test_groups_load_what_they_share() -> None:
    """Nodes 2 and 3 are on one switch: 2 sends to 0 and 3 to 4, both by its way up, of rate 1."""
    shared = Topology(TopologyKind.FAT_TREE, 6, sizes=(2, 3), oversubscription=2.0)
    loads = loads_of(SumAlgorithm.RING, shared, 3)
    assert loads is not None and [(round(3 * load, 9), count) for load, count in loads] == [(2, 4)]


def test_measured_points_are_read_between() -> None:
    link = Link.measured(((10, 1.0), (20, 3.0)))
    assert takes(SumAlgorithm.RING, RING_8, 120, link) == 2 * 7 * 2.0
