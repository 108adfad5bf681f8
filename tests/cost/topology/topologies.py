"""Topologies of so many nodes, one of each kind."""

from __future__ import annotations

import math

from autopar.core.topology import Topology, TopologyKind


def every(nodes: int) -> list[Topology]:
    """One of each kind; circuits are a line of nodes, and a second way to the last."""
    inner = max(size for size in range(1, math.isqrt(nodes) + 1) if nodes % size == 0)
    line = tuple((node, node + 1) for node in range(nodes - 1))
    return [
        Topology(TopologyKind.RING, nodes),
        Topology(TopologyKind.TORUS, nodes, sizes=(inner, nodes // inner)),
        Topology(TopologyKind.FAT_TREE, nodes, sizes=(inner, nodes // inner), oversubscription=2.0),
        Topology(TopologyKind.LOOP, nodes, shortcuts=(nodes // 2,) if nodes > 3 else ()),
        Topology(TopologyKind.SWITCH, nodes, circuits=(*line, (0, nodes - 1))),
    ]
