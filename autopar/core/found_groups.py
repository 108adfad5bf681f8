"""Groups of the devices that ranks find: like ones that follow each other, within a node or of whole nodes.

node 0   h100 h100 h100 h100     nodes 0 and 1   one group of two nodes
node 1   h100 h100 h100 h100
node 2   a100 a100 t4   t4       node 2          two groups that share it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from autopar.core.device_groups import DeviceGroup, GroupLink
from autopar.core.links import Link

FoundDevice = tuple[str, int | None]  # its kind, and its bytes


def groups_of_found(
    devices: Sequence[FoundDevice], per_node: int, *, intra: Link, inter: Link | None
) -> tuple[list[DeviceGroup], list[GroupLink]]:
    """Groups of the ranks' devices, `per_node` of them on each node, and the links that join them."""
    runs: list[tuple[FoundDevice, int, int]] = []  # with nodes, and devices on each
    for first in range(0, len(devices), per_node):
        for kind, same in groupby(devices[first : first + per_node]):
            count = len(list(same))
            if count == per_node and runs and runs[-1][0] == kind and runs[-1][2] == per_node:
                runs[-1] = kind, runs[-1][1] + 1, per_node
            else:
                runs.append((kind, 1, count))
    groups = [
        DeviceGroup(f"{device}-{number}", device, nodes, count, memory, intra=intra, inter=inter)
        for number, ((device, memory), nodes, count) in enumerate(runs)
    ]
    between, before = list[GroupLink](), 0
    for one, other in pairwise(groups):
        before += one.num_devices
        inside = before % per_node != 0
        link = intra if inside or inter is None else inter
        between.append(GroupLink((one.name, other.name), link, same_node=inside))
    return groups, between
