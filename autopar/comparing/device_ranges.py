"""Ranges of devices: twice as many each time, like those of one cluster.

local:1-8            1, 2, 4, 8 processes of this machine
h100.toml:4-64       4, 8, 16, 32, 64 devices like the file's: parts of a node, then whole nodes
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.cluster import ClusterSpec
from autopar.errors import InputError, show_value

_RANGE = re.compile(r"(local|.+\.toml):(\d{1,9})-(\d{1,9})")


def is_range(text: str) -> bool:
    """Whether a `--cluster` names a range of device counts."""
    return _RANGE.fullmatch(text) is not None


def clusters_of(text: str) -> list[ClusterSpec]:
    """The clusters of a range of devices, twice as many each time, and the last; raises InputError."""
    match = _RANGE.fullmatch(text)
    assert match is not None
    kind, first, last = match[1], int(match[2]), int(match[3])
    if not 1 <= first <= last:
        raise InputError(
            where="--cluster",
            found=show_value(text),
            wanted="a range such as 1-8, from at least 1 device to as many or more",
            remedy=f"write {kind}:1-{max(first, last, 1)}",
        )
    if kind == "local":
        return [ClusterSpec.local(count) for count in _counts(first, last)]
    whole = ClusterSpec.from_toml(kind)
    return [_with_devices(whole, count) for count in _counts(first, last)]


def _counts(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
    yield last


def _with_devices(whole: ClusterSpec, count: int) -> ClusterSpec:
    """A cluster of `count` devices like those of another: on one node, or on whole nodes."""
    nodes, rest = divmod(count, whole.devices_per_node)
    if nodes > 0 and rest:
        raise InputError(
            where="--cluster",
            found=f"{count} devices, of nodes with {whole.devices_per_node}",
            wanted="a part of one node, or whole nodes",
            remedy=f"choose a range that doubles to a multiple of {whole.devices_per_node}",
        )
    return whole.shaped(nodes, whole.devices_per_node) if nodes else whole.shaped(1, count)
