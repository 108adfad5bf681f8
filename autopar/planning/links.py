"""What exchanges between devices rest on: the cluster's own words, or messages that were measured on it.

autopar plan      within a node 2.5 GB/s, 150 us (estimated)
autopar run       measures every collective, once
autopar explain   within a node 1.4 GB/s, 210 us (measured), and a note: another plan may be best since
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import ClusterSpec, Link
from autopar.cost.machine.collectives import CollectiveTable


def described(cluster: ClusterSpec, table: CollectiveTable) -> str:
    """The cluster in words, each link as it was measured where it was."""
    intra, inter = _measured(table, 1), _measured(table, 2) if cluster.inter else None
    known = replace(cluster, intra=intra or cluster.intra, inter=inter or cluster.inter)
    return str(known)


def link_notes(cluster: ClusterSpec, table: CollectiveTable) -> tuple[str, ...]:
    """A note on when links were measured, and on the bandwidths that earlier plans rested on; none for one
    device, which uses no link."""
    within = cluster.devices_per_node > 1 and _measured(table, 1)
    links = [cluster.intra if within else None, cluster.inter if _measured(table, 2) else None]
    before = " and ".join(str(link) for link in links if link)
    if not before:
        return ()
    return (
        f"links were measured on {_moment(table.measured_at)}: plans made before rest on {before}, and may "
        "differ from this one",
    )


def _measured(table: CollectiveTable, nodes: int) -> Link | None:
    """The link between two ranks that lie on so many nodes."""
    line = table.message(nodes=nodes)
    return Link(*line, is_measured=True) if line else None


def _moment(text: str) -> str:
    """A time of the database to the minute, in the words of a note."""
    return f"{text[:10]} at {text[11:16]} UTC"
