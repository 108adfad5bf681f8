"""How the links between nodes are laid, as a cluster file says it.

    ring        0 - 1 - 2 - ... - 0
    torus       a grid whose rows, columns ... are rings: `sizes = [4, 4]`, the last dim's nodes follow each
                other
    fat tree    `sizes = [4, 2]`: 4 nodes on each switch, 2 such switches on one above. A switch's way up
                carries what all its nodes send, or 1/`oversubscription` of it, at each level again
    loop        a ring with shortcuts: `shortcuts = [4, 8]`, from each node to those 4 and 8 further on
    switch      a circuit switch: `circuits = [[0, 1], [1, 2]]` are the links that exist

Every link goes both ways, at the rate of the link between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autopar.core.cluster_keys import is_finite, violation, whole_number
from autopar.errors import InputError, show_value

MOST_JOINED_NODES = 1024  # by links of a known topology: routes between all of them are found in seconds
MOST_OVERSUBSCRIPTION = 1000.0
INTER = "links.inter"


class TopologyKind(Enum):
    """The names that a cluster file may give."""

    RING = "ring"
    TORUS = "torus"
    FAT_TREE = "fat tree"
    LOOP = "loop"
    SWITCH = "switch"


NEEDED: Mapping[TopologyKind, tuple[str, ...]] = {
    TopologyKind.RING: (),
    TopologyKind.TORUS: ("sizes",),
    TopologyKind.FAT_TREE: ("sizes",),
    TopologyKind.LOOP: ("shortcuts",),
    TopologyKind.SWITCH: ("circuits",),
}
TOPOLOGY_KEYS = ("topology", "sizes", "oversubscription", "shortcuts", "circuits")


@dataclass(frozen=True, slots=True)
class Topology:
    """Links between `nodes` nodes; raises `InputError` by the name of what is wrong."""

    kind: TopologyKind
    nodes: int
    sizes: tuple[int, ...] = ()
    oversubscription: float = 1.0
    shortcuts: tuple[int, ...] = ()
    circuits: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.nodes > MOST_JOINED_NODES:
            raise violation(
                f"{INTER}.topology", f"{self.nodes:,} nodes", f"a topology of at most {MOST_JOINED_NODES:,}"
            )
        if "sizes" in NEEDED[self.kind] and math.prod(self.sizes) != self.nodes:
            product = " x ".join(map(str, self.sizes)) or "nothing"
            raise violation(
                f"{INTER}.sizes",
                f"{product} = {math.prod(self.sizes):,}",
                f"sizes whose product is {self.nodes} nodes",
            )
        if wrong := [stride for stride in self.shortcuts if not 1 < stride < self.nodes]:
            raise violation(
                f"{INTER}.shortcuts", show_value(wrong[0]), f"nodes further on, from 2 to {self.nodes - 1}"
            )
        self._check_circuits()

    def _check_circuits(self) -> None:
        if self.kind is not TopologyKind.SWITCH:
            return
        where = f"{INTER}.circuits"
        for pair in self.circuits:
            if pair[0] == pair[1] or not all(0 <= node < self.nodes for node in pair):
                raise violation(where, show_value(list(pair)), f"two nodes of 0 to {self.nodes - 1}")
        if apart := self._apart():
            raise violation(where, f"no way from node 0 to node {apart[0]}", "links that connect all nodes")

    def _apart(self) -> list[int]:
        """The nodes that no circuits lead to."""
        reached, grows = {0}, True
        while grows:
            new = {b for pair in self.circuits for a, b in (pair, pair[::-1]) if a in reached} - reached
            reached, grows = reached | new, bool(new)
        return [node for node in range(self.nodes) if node not in reached]

    def __str__(self) -> str:
        match self.kind:
            case TopologyKind.TORUS | TopologyKind.FAT_TREE:
                over = f", {self.oversubscription:g} to 1" if self.oversubscription != 1 else ""
                return f"{self.kind.value} of {' x '.join(map(str, self.sizes))}{over}"
            case TopologyKind.LOOP:
                return f"loop of {self.nodes} with shortcuts {', '.join(map(str, self.shortcuts))}"
            case TopologyKind.SWITCH:
                return f"switch with {len(self.circuits)} circuits"
            case _:
                return f"{self.kind.value} of {self.nodes}"


def read_topology(
    table: Mapping[str, object], nodes: int, wrong: list[InputError]
) -> tuple[dict[str, object], Topology | None]:
    """Split a table [links.inter] into the link's own keys and its topology; violations join `wrong`."""
    rest = {key: value for key, value in table.items() if key not in TOPOLOGY_KEYS}
    given = {key: table[key] for key in TOPOLOGY_KEYS if key in table}
    if not given:
        return rest, None
    try:
        return rest, _read(given, nodes)
    except InputError as error:
        wrong.append(error)
        return rest, None


def _read(given: Mapping[str, object], nodes: int) -> Topology:
    kind = _kind(given.get("topology"))
    allowed = {"topology", *NEEDED[kind]} | ({"oversubscription"} if kind is TopologyKind.FAT_TREE else set())
    for key in given:
        if key not in allowed:
            raise violation(
                f"{INTER}.{key}", f"{key} of a {kind.value}", f"one of {', '.join(sorted(allowed))}"
            )
    for key in NEEDED[kind]:
        if key not in given:
            raise violation(f"{INTER}.{key}", "nothing", f"the {key} of a {kind.value}")
    values = {key: READERS[key](f"{INTER}.{key}", value) for key, value in given.items() if key != "topology"}
    return Topology(kind, nodes, **values)


def _kind(value: object) -> TopologyKind:
    for kind in TopologyKind:
        if value == kind.value:
            return kind
    names = ", ".join(f'"{kind.value}"' for kind in TopologyKind)
    raise violation(f"{INTER}.topology", "nothing" if value is None else show_value(value), f"one of {names}")


def _counts(where: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise violation(where, show_value(value), "a list of whole numbers such as [4, 2]")
    return tuple(whole_number(where, each) for each in value)


def _pairs(where: str, value: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list):
        raise violation(where, show_value(value), "a list of pairs of nodes such as [[0, 1], [1, 2]]")
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(node) is int for node in pair)):
            raise violation(where, show_value(pair), "a pair of nodes such as [0, 1]")
    return tuple((first, second) for first, second in value)


def _ratio(where: str, value: object) -> float:
    if isinstance(value, (int, float)) and is_finite(value) and 1 <= value <= MOST_OVERSUBSCRIPTION:
        return float(value)
    raise violation(where, show_value(value), f"a number from 1 to {MOST_OVERSUBSCRIPTION:g} such as 2")


READERS: Mapping[str, Callable[[str, object], Any]] = {
    "sizes": _counts,
    "oversubscription": _ratio,
    "shortcuts": _counts,
    "circuits": _pairs,
}
