"""The clusters on which an elastic run may go on: with a rank fewer, with half of them, with all.

4 of 2:4   3, 2        3 of 2:4   2, 4        8 of 2:8   7, 4
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from autopar.cluster import ClusterSpec
from autopar.core.elastic_bounds import Elastic
from autopar.errors import InputError

WORLDS = "AUTOPAR_WORLDS"  # the environment variable in which the launcher says how many ranks there may be


def other_worlds(cluster: ClusterSpec, environment: Mapping[str, str]) -> list[ClusterSpec]:
    """Clusters of other sizes for which plans are wanted; none where nobody starts the run on them."""
    text, count = environment.get(WORLDS, ""), cluster.num_devices
    is_island = environment.get("WORLD_SIZE", str(count)) != str(count)
    if not text or cluster.nodes > 1 or cluster.groups or is_island:
        return []
    bounds, found = Elastic.parse(text), []
    for size in dict.fromkeys((count - 1, count // 2, bounds.most)):
        if bounds.least <= size <= bounds.most and size != count:
            with suppress(InputError):
                found.append(_resized(cluster, size))
    return found


def _resized(cluster: ClusterSpec, size: int) -> ClusterSpec:
    """The cluster as a script finds it on so many ranks: of this machine with its memory in other parts."""
    if cluster == ClusterSpec.local(cluster.num_devices):
        return ClusterSpec.local(size)
    return cluster.shaped(1, size)
