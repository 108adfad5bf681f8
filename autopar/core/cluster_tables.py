"""Tables of a cluster's file, as values: one kind of devices, or groups of unlike ones.

[cluster], [links.intra], [links.inter], [links.host], [device]      keywords of a cluster
[[groups]], [[links.between]]                                        groups, and the tree of their links
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.core.cluster_keys import (
    BETWEEN_KEYS,
    CARD_KEYS,
    CLUSTER_KEYS,
    DEVICE_KEYS,
    GROUP_KEYS,
    LINK_KEYS,
    MOST_DEVICES,
    as_table,
    as_tables,
    read_table,
    refuse,
    violation,
)
from autopar.core.device_groups import DeviceGroup, GroupLink, check_groups
from autopar.core.links import DescribedDevice, Link
from autopar.core.topology import Topology, read_topology
from autopar.errors import InputError


def cluster_values(path: str, document: Mapping[str, object], lines: Mapping[str, int]) -> dict[str, Any]:
    """Keywords of the cluster that a file describes; raises `InputError` with all violations."""
    wrong: list[InputError] = []
    tables = read_table("", document, {"cluster": as_table, "links": as_table, "device": as_table}, wrong)
    values = read_table("cluster", tables.get("cluster", {}), CLUSTER_KEYS, wrong)
    if "devices_per_node" not in tables.get("cluster", {}):
        wrong.append(violation("cluster.devices_per_node", "nothing", "the number of devices of each node"))
    links = read_table(
        "links", tables.get("links", {}), dict.fromkeys(("intra", "inter", "host"), as_table), wrong
    )
    if "inter" in links:
        links["inter"], values["topology"] = read_topology(links["inter"], values.get("nodes", 1), wrong)
    for name, table in links.items():
        values[name] = _read_link(f"links.{name}", table, values.get("devices_per_node", 1), wrong)
    wrong += missing_inter(values.get("nodes", 1), links.get("inter"))
    wrong += needless_host(values, links.get("host")) + too_many(values)
    if "device" in tables:
        values |= _read_device(tables["device"], values, wrong)
    refuse(path, wrong, lines)
    return values


def cluster_groups(
    path: str, document: Mapping[str, object], lines: Mapping[str, int]
) -> tuple[list[DeviceGroup], list[GroupLink], Link | None]:
    """Groups, links between them and to the host, of tables [[groups]] and [[links.between]].

    Links of all groups stand beside these. Raises `InputError` with all violations.
    """
    wrong: list[InputError] = []
    tables = read_table("", document, {"groups": as_tables, "links": as_table}, wrong)
    names = {"intra": as_table, "inter": as_table, "host": as_table, "between": as_tables}
    links = read_table("links", tables.get("links", {}), names, wrong)
    tied = [_read_between(number, each, wrong) for number, each in enumerate(links.get("between", ()), 1)]
    given = enumerate(tables.get("groups", ()), 1)
    groups = [_read_group(number, each, links, wrong) for number, each in given]
    host = _read_link("links.host", links["host"], 1, wrong) if "host" in links else None
    if not wrong:
        wrong += check_groups(groups, [each for each in tied if each])
    refuse(path, wrong, lines)
    return groups, [each for each in tied if each], host


def _read_group(
    number: int, table: Mapping[str, object], links: Mapping[str, Any], wrong: list[InputError]
) -> DeviceGroup:
    where = f"groups.{number}"
    values = read_table(where, table, GROUP_KEYS, wrong)
    wrong += [violation(f"{where}.{key}", "nothing", f"the group's {key}") for key in _missing_of(table)]
    figures = {key: values.pop(key) for key in ("flops", "bandwidth") if key in values}
    if len(figures) == 1 or (figures and values.get("device", "cpu") == "cpu"):
        wrong.append(
            violation(where, " ".join(figures), "flops and bandwidth, of a GPU with a name of its own")
        )
    elif figures:
        values["described"] = DescribedDevice(figures["flops"], figures["bandwidth"])
    devices = values.get("devices_per_node", 1)
    for name in ("intra", "inter"):
        at, table_of = (
            (f"{where}.{name}", values[name]) if name in values else (f"links.{name}", links.get(name))
        )
        values[name] = None if table_of is None else _read_link(at, table_of, devices, wrong)
    if values.get("nodes", 1) > 1 and "inter" not in table and "inter" not in links:
        wrong.append(violation(f"{where}.inter", "nothing", f"the link between its {values['nodes']} nodes"))
    return DeviceGroup(**{"name": str(number), "device": "cpu", **values})


def _missing_of(table: Mapping[str, object]) -> list[str]:
    return [key for key in ("name", "device") if key not in table]


def _read_between(number: int, table: Mapping[str, object], wrong: list[InputError]) -> GroupLink | None:
    where = f"links.between.{number}"
    values = read_table(where, table, BETWEEN_KEYS, wrong)
    if "groups" not in table:
        wrong.append(violation(f"{where}.groups", "nothing", "the names of the two groups that it joins"))
    plain = {key: value for key, value in table.items() if key in LINK_KEYS}
    link = _read_link(where, plain, 1, wrong)
    if link is None or "groups" not in values:
        return None
    return GroupLink(values["groups"], link, values.get("same_node", False))


def _read_link(where: str, table: Mapping[str, object], devices: int, wrong: list[InputError]) -> Link | None:
    """The link of a table; between nodes what each of a node's `devices` has of its network cards."""
    values = read_table(where, table, CARD_KEYS if where.endswith("inter") else LINK_KEYS, wrong)
    if "points" in table:
        more = [key for key in ("bandwidth", "latency", "cards") if key in table]
        wrong += [violation(f"{where}.{key}", "points beside it", "one of both") for key in more]
        return Link.measured(values["points"]) if "points" in values else None
    missing = [key for key in ("bandwidth", "latency") if key not in table]
    wrong += [violation(f"{where}.{key}", "nothing", f"the link's {key}") for key in missing]
    if not {"bandwidth", "latency"} <= values.keys():
        return None
    cards = values.get("cards", devices)
    return Link(values["latency"], values["bandwidth"] * cards / devices)


def _read_device(
    table: Mapping[str, object], values: Mapping[str, Any], wrong: list[InputError]
) -> dict[str, Any]:
    """Read a table [device]: the description, and the memory if [cluster] doesn't give it."""
    found = read_table("device", table, DEVICE_KEYS, wrong)
    missing = [key for key in ("flops", "bandwidth") if key not in table]
    wrong += [violation(f"device.{key}", "nothing", f"the device's {key}") for key in missing]
    if values.get("device", "cpu") == "cpu":
        wrong.append(
            violation("cluster.device", repr(values.get("device")), "a name for the GPU of [device]")
        )
    if "memory" in found and "memory" in values:
        wrong.append(violation("device.memory", "memory in [cluster] too", "one of both"))
    memory = {"memory": found["memory"]} if "memory" in found else {}
    if not {"flops", "bandwidth"} <= found.keys():
        return memory
    return memory | {"described": DescribedDevice(found["flops"], found["bandwidth"])}


def too_many(values: Mapping[str, Any]) -> list[InputError]:
    """Violations by more devices than any cluster has."""
    count = values.get("nodes", 1) * values.get("devices_per_node", 1)
    if count <= MOST_DEVICES:
        return []
    return [violation("cluster", f"{count:,} devices", f"at most {MOST_DEVICES:,}")]


def other_nodes(values: Mapping[str, Any], topology: Topology | None) -> list[InputError]:
    """Violations by a topology whose nodes aren't the cluster's, nor those of several clusters like it."""
    nodes = values.get("nodes", 1)
    if topology is None or topology.nodes % nodes == 0:
        return []
    found = f"a {topology.kind.value} between {topology.nodes} nodes"
    return [violation("links.inter.topology", found, f"one between the {nodes} nodes of the cluster")]


def missing_inter(nodes: int, inter: object) -> list[InputError]:
    """Violations by several nodes without a link between them."""
    if nodes == 1 or inter is not None:
        return []
    return [violation("links.inter", "nothing", f"the link between the {nodes} nodes")]


def needless_host(values: Mapping[str, Any], host: object) -> list[InputError]:
    """Violations by a link to the host, of devices whose memory is the host's."""
    if host is None or values.get("device", "cpu") != "cpu":
        return []
    return [violation("links.host", "a link of CPUs to the host", "none: their memory is the host's")]
