"""Groups of like devices, and the links between groups: a tree.

    fast   3 nodes of 4   ranks 0 to 11    .---------.  10 Gbit/s  .----------.
    slow   1 node of 4    ranks 12 to 15   |  fast   |-------------|   slow   |
                                           `---------'             `----------'

Groups fill the ranks one after the other. Those that a link joins within a node lie on one node together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.core.cluster_keys import GROUP_KEYS, read_table, refuse, violation
from autopar.core.links import DescribedDevice, Link
from autopar.errors import InputError

_READ = ("name", "device", "nodes", "devices_per_node", "memory", "speed")


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """`nodes` times `devices_per_node` devices of one kind, with `memory` bytes each; `speed` is what such a
    device does of what its kind was measured to do, 0.5 for a throttled one."""

    name: str
    device: str
    nodes: int = 1
    devices_per_node: int = 1
    memory: int | None = None
    speed: float = 1.0
    intra: Link | None = None
    inter: Link | None = None
    described: DescribedDevice | None = None

    def __post_init__(self) -> None:
        """Take memory also as text; raises InputError with all violations."""
        wrong: list[InputError] = []
        given = {key: value for key in _READ if (value := getattr(self, key)) is not None}
        for key, value in read_table(f"group {self.name}", given, GROUP_KEYS, wrong).items():
            object.__setattr__(self, key, value)
        refuse("DeviceGroup", wrong)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def kind(self) -> tuple[object, ...]:
        """What devices of alike groups have in common."""
        return self.device, self.memory, self.speed, self.described

    def __str__(self) -> str:
        speed = f" at {self.speed:g} of its speed" if self.speed != 1 else ""
        return f"{self.nodes} x {self.devices_per_node} {self.device}{speed}"


@dataclass(frozen=True, slots=True)
class GroupLink:
    """The link between two groups, by name; within a node where both lie on one."""

    groups: tuple[str, str]
    link: Link
    same_node: bool = False


def check_groups(groups: Sequence[DeviceGroup], between: Sequence[GroupLink]) -> list[InputError]:
    """Violations by no groups, names that are unclear, devices of other types, and links that are no tree."""
    if not groups:
        return [violation("groups", "none", "at least one group of devices")]
    names = [group.name for group in groups]
    wrong = [
        violation("groups", f"{names.count(name)} groups named {name!r}", "a name for each")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if len({group.device == "cpu" for group in groups}) > 1:
        told = ", ".join(f"{group.name} of {group.device}" for group in groups)
        wrong.append(violation("groups", told, "CPUs alone or GPUs alone"))
    strange = [name for each in between for name in each.groups if name not in names]
    if strange:
        wrong.append(violation("links.between", repr(strange[0]), f"one of {', '.join(names)}"))
    elif not wrong:
        wrong += _check_tree(names, between) + _check_nodes(groups, between)
    return wrong


def _check_tree(names: Sequence[str], between: Sequence[GroupLink]) -> list[InputError]:
    """Violations by links between groups that leave one out, or go round."""
    parts = [[names[place] for place in part] for part in _joined(names, between)]
    if len(parts) > 1:
        found = f"no link between {' '.join(parts[0])} and {' '.join(parts[1])}"
        return [violation("links.between", found, "links that join all groups, as a tree")]
    for number, each in enumerate(between):
        if len(_joined(names, between[: number + 1])) == len(_joined(names, between[:number])):
            found = f"a ring of links, which {' - '.join(each.groups)} closes"
            return [violation("links.between", found, "a tree: one way from each group to each other")]
    return []


def _joined(names: Sequence[str], links: Iterable[GroupLink]) -> list[list[int]]:
    """Places of names that links join, directly or by way of others."""
    parts = [[place] for place in range(len(names))]
    for each in links:
        ends = [next(part for part in parts if names.index(name) in part) for name in each.groups]
        if ends[0] is not ends[1]:
            parts.remove(ends[1])
            ends[0].extend(ends[1])
    return [sorted(part) for part in parts]


def _check_nodes(groups: Sequence[DeviceGroup], between: Sequence[GroupLink]) -> list[InputError]:
    """Violations by groups of several nodes, or apart among the ranks, that are to share one."""
    wrong = []
    for members in _shared_nodes(groups, between):
        several = [groups[place].name for place in members if groups[place].nodes > 1 and len(members) > 1]
        if several:
            wrong.append(violation(f"group {several[0]}", "several nodes, and one shared", "one of both"))
        if members != list(range(members[0], members[-1] + 1)):
            names = ", ".join(groups[place].name for place in members)
            wrong.append(violation("groups", f"{names} of one node apart", "groups of a node in a row"))
    return wrong


def _shared_nodes(groups: Sequence[DeviceGroup], between: Sequence[GroupLink]) -> list[list[int]]:
    """Places of groups that lie on the same nodes."""
    return _joined([group.name for group in groups], [each for each in between if each.same_node])


def node_size(groups: Sequence[DeviceGroup], between: Sequence[GroupLink]) -> int:
    """Devices of a node; of nodes of unlike sizes as many as divide each."""
    sizes = (
        sum(groups[place].devices_per_node for place in members) for members in _shared_nodes(groups, between)
    )
    return math.gcd(*sizes)


def slowest(links: Iterable[Link | None]) -> Link | None:
    """The link that sets the pace of an exchange over all: the least bandwidth, with the most latency."""
    known = [link for link in links if link is not None]
    if len(set(known)) < 2:
        return known[0] if known else None
    least = min(known, key=lambda link: link.bandwidth)
    late = max(link.latency for link in known)
    if least.points or least.latency == late:
        return least
    return Link(late, least.bandwidth, least.estimated, is_measured=least.is_measured)
