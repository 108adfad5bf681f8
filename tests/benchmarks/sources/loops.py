"""Sums by shifted halving-doubling on a loop network against those on a fat tree.

The loop has shortcuts of 2, 4, 8 ... nodes, so that every message of a shift is one hop; a node sends on one
link at a time. The tree has 16 nodes on a switch, and ways up of the full rate or a third of it. What a loop
saves is 1 - its seconds / the tree's, each with its best algorithm.
"""

from __future__ import annotations

from autopar.cluster import Link
from autopar.core.sum_schedules import SumAlgorithm
from autopar.core.topology import Topology, TopologyKind
from autopar.cost.topology.price import loads_of, loads_seconds
from autopar.units import show_seconds
from tests.benchmarks.sources.figures import FigureRow, FigureTable

NODE_COUNTS = (64, 128, 256)
SUM_BYTES = 100_000_000
SWITCH_NODES = 16
NARROW = 3.0
FABRIC = Link(5e-6, 12.5e9)


def loop(nodes: int) -> Topology:
    """A ring with shortcuts of all powers of two."""
    shortcuts = tuple(1 << place for place in range(1, (nodes - 1).bit_length()))
    return Topology(TopologyKind.LOOP, nodes, shortcuts=shortcuts)


def tree(nodes: int, oversubscription: float) -> Topology:
    """Two levels of switches."""
    sizes = (SWITCH_NODES, nodes // SWITCH_NODES)
    return Topology(TopologyKind.FAT_TREE, nodes, sizes=sizes, oversubscription=oversubscription)


def best(topology: Topology, nbytes: int = SUM_BYTES) -> tuple[float, SumAlgorithm]:
    """The least seconds of a sum, by an algorithm of many steps, and that algorithm.

    All to all at once is left out: it takes one latency for as many messages as there are nodes.
    """
    known = {
        each: loads_seconds(loads, nbytes, FABRIC)
        for each in SumAlgorithm
        if each is not SumAlgorithm.FULL and (loads := loads_of(each, topology, topology.nodes))
    }
    name = min(known, key=lambda each: known[each])
    return known[name], name


def saved(nodes: int, oversubscription: float) -> float:
    """The part of the tree's seconds that the loop saves."""
    return 1 - best(loop(nodes))[0] / best(tree(nodes, oversubscription))[0]


def table() -> FigureTable:
    """Three sizes."""
    rows = []
    for nodes, published in zip(NODE_COUNTS, ("31 %", "71 %", "90 %"), strict=True):
        seconds, name = best(loop(nodes))
        wide, narrow = best(tree(nodes, 1.0)), best(tree(nodes, NARROW))
        trees = f"{show_seconds(wide[0])} ({wide[1].value}), {show_seconds(narrow[0])} ({narrow[1].value})"
        rows.append(
            FigureRow(
                f"{nodes} nodes",
                f"loop {show_seconds(seconds)} ({name.value}); trees {trees}",
                f"{saved(nodes, 1.0):.0%}, {saved(nodes, NARROW):.0%}",
                published,
                "the published three sizes, message and tree aren't known here; a step counts one latency, "
                "whatever its hops, and a tree of full rate has no contention to save",
            )
        )
    title = f"{SUM_BYTES // 10**6} MB on a loop against fat trees of full rate and {NARROW:g} to 1, {FABRIC}"
    return FigureTable.of(title, "saved", rows)
