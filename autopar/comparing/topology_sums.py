"""Which algorithm sums fastest between the nodes of a cluster whose links are laid in a known way."""

from __future__ import annotations

from autopar.cluster import ClusterSpec
from autopar.core.costs import LinkLike
from autopar.core.sum_schedules import SumAlgorithm
from autopar.core.topology import Topology
from autopar.cost.topology.price import loads_of, loads_seconds
from autopar.errors import InputError
from autopar.results.comparison.sum_times import SumTime, SumTimes


def sum_times(cluster: ClusterSpec, nbytes: int) -> SumTimes:
    """Price every algorithm for `nbytes` of each node; raises `InputError` without a topology."""
    if cluster.topology is None or cluster.inter is None:
        raise InputError(
            where="--cluster",
            found=f"{cluster.devices} without a topology",
            wanted="a file that says how the links between its nodes are laid",
            remedy='write topology = "ring" into [links.inter]; docs/clusters.md has the others',
        )
    rows = [row_of(each, cluster.topology, cluster.inter, nbytes) for each in SumAlgorithm]
    return SumTimes(str(cluster), cluster.nodes, nbytes, tuple(rows))


def row_of(algorithm: SumAlgorithm, topology: Topology, link: LinkLike, nbytes: int) -> SumTime:
    """Steps, load and seconds of one algorithm among all nodes of a topology."""
    loads = loads_of(algorithm, topology, topology.nodes)
    if loads is None:
        return SumTime(algorithm.value, None, None, None)
    carried = sum(load * count for load, count in loads) * nbytes
    steps = sum(count for _, count in loads)
    return SumTime(algorithm.value, steps, carried, loads_seconds(loads, nbytes, link))
