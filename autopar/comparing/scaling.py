"""How many devices should I use? The best plan on more and more of them, for the same batch.

local:1-8            1, 2, 4, 8 processes of this machine
h100.toml:4-64       4, 8, 16, 32, 64 devices like the file's: parts of a node, then whole nodes
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from autopar.cluster import ClusterSpec
from autopar.errors import InfeasibleError, InputError
from autopar.planning.strategies_beside import reason_of
from autopar.results.plan import Plan
from autopar.results.scaling import Scaled, Scaling

_RANGE = re.compile(r"(local|.+\.toml):(\d+)-(\d+)")


def is_range(text: str) -> bool:
    """Whether a `--cluster` asks for several numbers of devices."""
    return _RANGE.fullmatch(text) is not None


def clusters_of(text: str) -> list[ClusterSpec]:
    """The clusters of a range of devices, twice as many each time, and the last; raises InputError."""
    match = _RANGE.fullmatch(text)
    assert match is not None
    kind, first, last = match[1], int(match[2]), int(match[3])
    if not 1 <= first <= last:
        raise InputError(
            where="--cluster",
            found=repr(text),
            wanted="a range such as 1-8, from at least 1 device to as many or more",
            remedy=f"write {kind}:1-{max(first, last, 1)}",
        )
    if kind == "local":
        return [ClusterSpec.local(count) for count in _counts(first, last)]
    whole = ClusterSpec.from_toml(kind)
    return [_with_devices(whole, count) for count in _counts(first, last)]


def scale(clusters: Sequence[ClusterSpec], plan: Callable[[ClusterSpec], Plan]) -> Scaling:
    """The best plan on each cluster; one without says why. Raises its error where no cluster has a plan."""
    rows, errors = [], []
    for cluster in clusters:
        found, reason = None, None
        try:
            found = plan(cluster)
        except (InfeasibleError, InputError) as error:
            reason = reason_of(error)
            errors.append(error)
        rows.append(Scaled(cluster.num_devices, cluster.devices, found, reason))
    if len(errors) == len(rows):
        raise errors[-1]
    return Scaling(tuple(rows))


def _counts(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
    yield last


def _with_devices(whole: ClusterSpec, count: int) -> ClusterSpec:
    """So many devices like those of a cluster: on one node, or on whole nodes."""
    nodes, rest = divmod(count, whole.devices_per_node)
    if nodes > 0 and rest:
        raise InputError(
            where="--cluster",
            found=f"{count} devices, of nodes with {whole.devices_per_node}",
            wanted="a part of one node, or whole nodes",
            remedy=f"choose a range that doubles to a multiple of {whole.devices_per_node}",
        )
    return ClusterSpec(
        nodes=max(nodes, 1),
        devices_per_node=whole.devices_per_node if nodes else count,
        device=whole.device,
        memory=whole.memory,
        cores=whole.cores,
        intra=whole.intra,
        inter=whole.inter if nodes > 1 else None,
        host=whole.host,
        host_memory=whole.host_memory,
    )
