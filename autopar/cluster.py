"""The machines to plan for: how many devices, how much memory, how fast the links.

Ranks fill the nodes one after the other, so with four devices per node

    node 0   r0 r1 r2 r3
    node 1   r4 r5 r6 r7      rank // devices_per_node is the node

and a mesh axis is fast if its groups stay inside one row of the drawing: on the mesh 2x4 axis b
uses the links within nodes, axis a those between them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from autopar.core.mesh import AXIS_NAMES, Mesh
from autopar.core.slurm import torchrun_variables
from autopar.core.user_text import LONGEST_TOML, parse_toml, read_text
from autopar.errors import InputError, show_value
from autopar.units import parse_bytes, parse_rate, parse_seconds, show_bytes, show_rate, show_seconds

MOST_DEVICES = 1_000_000  # more than any cluster has, and few enough to list their meshes in a second
MOST_BYTES = 1 << 63


def _is_finite(value: object) -> bool:
    """Whether it is a number with which floats can be multiplied."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two devices: `latency` in seconds, `bandwidth` in bytes per second each way.

    `estimated` marks numbers that nobody gave or measured, so that a plan can say so.
    """

    latency: float
    bandwidth: float
    estimated: bool = False

    def __post_init__(self) -> None:
        numbers = _is_finite(self.latency) and _is_finite(self.bandwidth)
        if not (numbers and self.latency >= 0 and self.bandwidth > 0):
            latency, bandwidth = show_value(self.latency), show_value(self.bandwidth)
            raise InputError(
                where="link",
                found=f"latency {latency} s, bandwidth {bandwidth} bytes/s",
                wanted="a finite latency of at least 0 and a finite bandwidth above 0",
                remedy="give seconds and bytes per second",
            )

    def __str__(self) -> str:
        mark = " (estimated)" if self.estimated else ""
        return f"{show_rate(self.bandwidth)}, {show_seconds(self.latency)}{mark}"


# Stand-ins until the links are measured. Only the first was seen on a machine: two gloo processes with one
# thread each on two cores, a message of 16 bytes one way and the slope up to 10 MB. The others are
# orders of magnitude: PCIe 4.0 x16 at 80 % of its 32 GB/s, and 10 Gbit/s Ethernet through TCP.
LOOPBACK = Link(latency=150e-6, bandwidth=2.5e9, estimated=True)
PCIE = Link(latency=10e-6, bandwidth=25e9, estimated=True)
ETHERNET = Link(latency=50e-6, bandwidth=1.25e9, estimated=True)


@dataclass(frozen=True, slots=True, init=False)
class ClusterSpec:
    """`nodes` machines with `devices_per_node` devices each.

    `device` is "cpu" or a kind of GPU ("h100", "cuda"); `memory` is bytes per device, None for no
    cap. `intra` links devices of one node, `inter` devices of different nodes, `host` each GPU with the
    memory of its node, None for unknown; of `host_memory`, None for no cap, the node's devices may take that
    many bytes together. `cores` are those that the CPU devices of a node share, counted as containers count
    them (0.5 is half of one's time), None for as many as this machine has.
    """

    nodes: int
    devices_per_node: int
    device: str
    memory: int | None
    cores: float | None
    intra: Link
    inter: Link | None
    host: Link | None
    host_memory: int | None

    def __init__(
        self,
        *,
        devices_per_node: int,
        nodes: int = 1,
        device: str = "cpu",
        memory: int | str | None = None,
        cores: float | None = None,
        intra: Link | None = None,
        inter: Link | None = None,
        host: Link | None = None,
        host_memory: int | str | None = None,
    ) -> None:
        """Take memory also as text (`"80GB"`); without `intra` a marked estimate stands in.

        Raises `InputError` with all violations at once.
        """
        wrong: list[InputError] = []
        given = {
            "nodes": nodes,
            "devices_per_node": devices_per_node,
            "device": device,
            "memory": memory,
            "cores": cores,
            "host_memory": host_memory,
        }
        values = _read("cluster", given, CLUSTER_KEYS, wrong)
        wrong += _too_many(values) + _missing_inter(values.get("nodes", 1), inter)
        wrong += _needless_host(values, host)
        _raise("ClusterSpec", wrong)
        values["intra"] = intra or (LOOPBACK if values["device"] == "cpu" else PCIE)
        values["inter"], values["host"] = inter, host
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def parse(text: str) -> ClusterSpec:
        """Read the command line's `local:4` or the path of a TOML file."""
        if count := re.fullmatch(r"local:(\d{1,9})", text):
            return ClusterSpec.local(int(count[1]))
        if text.endswith(".toml"):
            return ClusterSpec.from_toml(text)
        raise InputError(
            where="--cluster",
            found=show_value(text),
            wanted="local:N or a file that ends in .toml",
            remedy="write --cluster local:4 for four processes on this machine",
        )

    @staticmethod
    def local(num_processes: int) -> ClusterSpec:
        """`num_processes` processes of this machine: one GPU each if there are as many, else the CPU.

        Processes on the CPU share the machine's memory evenly.
        """
        return _this_machine(num_processes, nodes=1)

    @staticmethod
    def detect(environment: Mapping[str, str] = os.environ) -> ClusterSpec:
        """The cluster that torchrun or SLURM started this process on, its links estimated."""
        environment = {**environment, **torchrun_variables(environment)}
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        texts = [environment.get(name, "") for name in names]
        world, per_node = (int(text) if text.isdecimal() and len(text) < 10 else 0 for text in texts)
        if not (world and per_node and world % per_node == 0):
            raise InputError(
                where="environment",
                found=", ".join(
                    f"{name}={show_value(text)}" for name, text in zip(names, texts, strict=True)
                ),
                wanted="whole numbers, as torchrun sets them, with equally many processes on every node",
                remedy="start the script by `autopar run SCRIPT --cluster local:4` or by torchrun",
            )
        return _this_machine(per_node, nodes=world // per_node)

    @staticmethod
    def from_toml(path: str | Path) -> ClusterSpec:
        """Read the tables `[cluster]`, `[links.intra]`, `[links.inter]` and `[links.host]`.

        [cluster]                       [links.intra]
        nodes = 2                       bandwidth = "450GB/s"
        devices_per_node = 4            latency = "2us"
        device = "h100"
        memory = "80GB"                 [links.inter] likewise; needed if nodes > 1
        host_memory = "1TB"             [links.host] likewise: from a GPU to its node's memory

        Bandwidths count bytes or bits: "200Mbit/s" is "25MB/s". A cluster of CPUs may say `cores` too;
        `host_memory` and the link to it serve offload, and are left out where unknown.

        Raises `InputError` with all violations at once.
        """
        try:
            document = parse_toml(read_text(path, longest=LONGEST_TOML))
        except ValueError as cause:
            raise InputError(
                where=str(path),
                found=str(cause),
                wanted="a readable TOML file",
                remedy="see docs/clusters.md for a cluster file",
            ) from cause
        return _from_tables(str(path), document)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """How torch calls the device: "cpu" or "cuda"."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def devices(self) -> str:
        """How many of which kind: `2 x 4 h100` are two nodes of four."""
        return f"{self.nodes} x {self.devices_per_node} {self.device}"

    def meshes(self) -> tuple[Mesh, ...]:
        """Every mesh of all devices with one to three axes of two or more that fits the links.

        Only the major axis may leave a node, so with several nodes the other axes together must
        divide a node: two nodes of four give 8, 2x4, 4x2 and 2x2x2. Fewer axes come first, then
        the smaller major axis.
        """
        return tuple(
            Mesh(shape)
            for num_axes in range(1, len(AXIS_NAMES) + 1)
            for shape in _factorisations(self.num_devices, num_axes)
            if self.nodes == 1 or self.devices_per_node % math.prod(shape[1:]) == 0
        )

    def link(self, mesh: Mesh, axis: int) -> Link:
        """The slowest link that groups along `axis` use: `inter` if any of them crosses nodes."""
        self.check_world(mesh.num_devices)
        return self.inter if self.inter and self.nodes_of(mesh, (axis,)) > 1 else self.intra

    def nodes_of(self, mesh: Mesh, axes: Sequence[int]) -> int:
        """How many nodes a group along `axes` spans, at most."""
        self.check_world(mesh.num_devices)
        return max(len({rank // self.devices_per_node for rank in group}) for group in mesh.groups(axes))

    def stage(self, count: int) -> ClusterSpec:
        """The part that one of `count` pipeline ranks has: equally many devices, of one node or of whole
        nodes. Raises `InputError` if the cluster can't be cut so.
        """
        devices, rest = divmod(self.num_devices, max(count, 1))
        inside = devices and self.devices_per_node % devices == 0
        if count < 1 or rest or not (inside or devices % self.devices_per_node == 0):
            raise InputError(
                where="--stages",
                found=f"{count} for {self.nodes} nodes of {self.devices_per_node} devices",
                wanted="a number that cuts the cluster into equal parts of a node, or of whole nodes",
                remedy=f"choose a divisor of {self.num_devices}",
            )
        if inside:
            return self.shaped(1, devices)
        return self.shaped(devices // self.devices_per_node, self.devices_per_node)

    def shaped(self, nodes: int, devices_per_node: int) -> ClusterSpec:
        """So many nodes of so many devices like these, with the same links."""
        return ClusterSpec(
            nodes=nodes,
            devices_per_node=devices_per_node,
            device=self.device,
            memory=self.memory,
            cores=self.cores,
            intra=self.intra,
            inter=self.inter if nodes > 1 else None,
            host=self.host,
            host_memory=self.host_memory,
        )

    def stage_counts(self) -> tuple[int, ...]:
        """The numbers of pipeline ranks that `stage` can cut the cluster into."""
        return tuple(
            count
            for count in range(1, self.num_devices + 1)
            if self.num_devices % count == 0 and (count % self.nodes == 0 or self.nodes % count == 0)
        )

    def hop(self, count: int) -> Link:
        """The slowest link between neighbours of `count` pipeline ranks."""
        devices = self.num_devices // count
        crosses = self.nodes > 1 and devices * count > self.devices_per_node
        return self.inter if crosses and self.inter else self.intra

    def check_world(self, world_size: int) -> None:
        """Raise `InputError` unless the cluster has `world_size` devices."""
        if world_size != self.num_devices:
            raise InputError(
                where="world size",
                found=str(world_size),
                wanted=f"{self.num_devices} ({self.nodes} nodes of {self.devices_per_node} devices)",
                remedy="start one process for each device, or change nodes and devices_per_node",
            )

    def check_local(self) -> None:
        """Raise `InputError` unless the processes can be started here: on one node, GPUs if it has any."""
        found = None
        if self.nodes > 1:
            found = f"{self.nodes} nodes"
        elif self.device_type == "cuda" and (here := _count_gpus()) < self.num_devices:
            found = f"{self.num_devices} x {self.device}, of which this machine has {here}"
        if found:
            raise InputError(
                where="--cluster",
                found=found,
                wanted="devices of this machine, where the processes start",
                remedy="write --cluster local:4, or start the script on every node by torchrun",
            )

    def __str__(self) -> str:
        memory = f" of {show_bytes(self.memory)}" if self.memory is not None else ""
        cores = f", {self.cores:g} cores a node" if self.cores is not None else ""
        inter = f"; between nodes {self.inter}" if self.inter else ""
        host = f"; to the host {self.host}" if self.host else ""
        return f"{self.devices}{memory}{cores}; within a node {self.intra}{inter}{host}"


Reader: TypeAlias = Callable[[str, object], Any]  # (where, value) -> the value read; raises InputError


def _count(where: str, value: object, most: int = MOST_DEVICES) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
        return value
    least = f"from 1 to {most:,}" if isinstance(value, int) and value > most else "of at least 1"
    raise _wrong(where, show_value(value), f"a whole number {least}")


def _device(where: str, value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip().lower()
    raise _wrong(where, show_value(value), 'a kind of device such as "cpu" or "h100"')


def _memory(where: str, value: object) -> int | None:
    if value is None:
        return None
    return _count(where, parse_bytes(value, where=where) if isinstance(value, str) else value, MOST_BYTES)


def _cores(where: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and _is_finite(value) and value > 0:
        return float(value)
    raise _wrong(where, show_value(value), "a number of cores above 0 such as 8 or 0.5")


def _rate(where: str, value: object) -> float:
    if isinstance(value, str):
        return parse_rate(value, where=where)
    raise _wrong(where, show_value(value), 'a text with its unit such as "450GB/s"')


def _seconds(where: str, value: object) -> float:
    if isinstance(value, str):
        return parse_seconds(value, where=where)
    raise _wrong(where, show_value(value), 'a text with its unit such as "2us"')


def _table(where: str, value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    raise _wrong(where, show_value(value), f"a table [{where}]")


CLUSTER_KEYS: Mapping[str, Reader] = {
    "nodes": _count,
    "devices_per_node": _count,
    "device": _device,
    "memory": _memory,
    "cores": _cores,
    "host_memory": _memory,
}
LINK_KEYS: Mapping[str, Reader] = {"bandwidth": _rate, "latency": _seconds}


def _read(
    where: str, table: Mapping[str, object], readers: Mapping[str, Reader], wrong: list[InputError]
) -> dict[str, Any]:
    """The values of `table` that can be read; what is unknown or cannot be read joins `wrong`."""
    prefix = f"{where}." if where else ""
    wrong += [
        _wrong(prefix + key, "an unknown key", f"one of {', '.join(readers)}")
        for key in table
        if key not in readers
    ]
    values = {}
    for key in (key for key in readers if key in table):
        try:
            values[key] = readers[key](prefix + key, table[key])
        except InputError as error:
            wrong.append(error)
    return values


def _from_tables(path: str, document: Mapping[str, object]) -> ClusterSpec:
    wrong: list[InputError] = []
    tables = _read("", document, {"cluster": _table, "links": _table}, wrong)
    values = _read("cluster", tables.get("cluster", {}), CLUSTER_KEYS, wrong)
    if "devices_per_node" not in tables.get("cluster", {}):
        wrong.append(_wrong("cluster.devices_per_node", "nothing", "the number of devices of each node"))
    links = _read("links", tables.get("links", {}), {"intra": _table, "inter": _table, "host": _table}, wrong)
    for name, table in links.items():
        values[name] = _read_link(f"links.{name}", table, wrong)
    wrong += _too_many(values) + _missing_inter(values.get("nodes", 1), links.get("inter"))
    wrong += _needless_host(values, links.get("host"))
    _raise(path, wrong)
    return ClusterSpec(**values)


def _read_link(where: str, table: Mapping[str, object], wrong: list[InputError]) -> Link | None:
    values = _read(where, table, LINK_KEYS, wrong)
    missing = [key for key in LINK_KEYS if key not in table]
    wrong += [_wrong(f"{where}.{key}", "nothing", f"the link's {key}") for key in missing]
    if len(values) < len(LINK_KEYS):
        return None
    try:
        return Link(**values)
    except InputError as error:
        wrong.append(_wrong(where, error.found, error.wanted))
        return None


def _missing_inter(nodes: int, inter: object) -> list[InputError]:
    if nodes == 1 or inter is not None:
        return []
    return [_wrong("links.inter", "nothing", f"the link between the {nodes} nodes")]


def _too_many(values: Mapping[str, Any]) -> list[InputError]:
    """Violations by more devices than any cluster has."""
    count = values.get("nodes", 1) * values.get("devices_per_node", 1)
    if count <= MOST_DEVICES:
        return []
    return [_wrong("cluster", f"{count:,} devices", f"at most {MOST_DEVICES:,}")]


def _needless_host(values: Mapping[str, Any], host: object) -> list[InputError]:
    """Violations by a link to the host, of devices whose memory is the host's."""
    if host is None or values.get("device", "cpu") != "cpu":
        return []
    return [_wrong("links.host", "a link of CPUs to the host", "none: their memory is the host's")]


def _wrong(where: str, found: str, wanted: str) -> InputError:
    return InputError(
        where=where, found=found, wanted=wanted, remedy="correct the description of the cluster"
    )


def _raise(source: str, wrong: list[InputError]) -> None:
    """Raise one error that lists all of `wrong`, if there are any."""
    if len(wrong) == 1:
        (only,) = wrong
        raise InputError(
            where=f"{source}: {only.where}", found=only.found, wanted=only.wanted, remedy=only.remedy
        )
    if wrong:
        raise InputError(
            where=f"{source}: {len(wrong)} violations",
            found="; ".join(f"{error.where}: {error.found}" for error in wrong),
            wanted="; ".join(f"{error.where}: {error.wanted}" for error in wrong),
            remedy="correct the description of the cluster",
        )


def _this_machine(num_processes: int, *, nodes: int) -> ClusterSpec:
    """`nodes` machines like this one, each with `num_processes` processes."""
    _count("number of processes", num_processes)
    import torch  # here, so that a text that names no cluster is told before torch is loaded

    inter = ETHERNET if nodes > 1 else None
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_processes:
        device = gpu_kind(torch.cuda.get_device_name(0))
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        device = "cpu"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_processes
    return ClusterSpec(nodes=nodes, devices_per_node=num_processes, device=device, memory=memory, inter=inter)


def _count_gpus() -> int:
    import torch  # here, so that a description of machines needs none

    return torch.cuda.device_count()


def gpu_kind(name: str) -> str:
    """The model in torch's name of a GPU: "NVIDIA H100 80GB HBM3" is an "h100"."""
    words = re.split(r"[\s-]+", name.lower())
    return next((word for word in words if any(map(str.isdigit, word))), "cuda")


def _factorisations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """All ordered products of `num_factors` factors >= 2, the smaller first factor first."""
    if num_factors == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, num_factors - 1):
                yield (first, *rest)
