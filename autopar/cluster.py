"""The machines to plan for: how many devices, how much memory, how fast the links.

Ranks fill the nodes one after the other, so with four devices per node

    node 0   r0 r1 r2 r3
    node 1   r4 r5 r6 r7      rank // devices_per_node is the node

and a mesh axis is fast if its groups stay inside one row of the drawing: on the mesh 2x4 axis b
uses the links within nodes, axis a those between them.

Of unlike groups (`core/device_groups.py`) an exchange goes at the pace of the slowest link of its kind, and
the memory of one device is that of the group with least.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from autopar.core.cluster_keys import (
    CLUSTER_KEYS,
    line_numbers,
    read_table,
    refuse,
    whole_number,
)
from autopar.core.cluster_tables import (
    cluster_groups,
    cluster_values,
    missing_inter,
    needless_host,
    other_nodes,
    too_many,
)
from autopar.core.device_groups import DeviceGroup, GroupLink, check_groups, node_size, slowest
from autopar.core.found_groups import FoundDevice, groups_of_found
from autopar.core.links import ETHERNET as ETHERNET
from autopar.core.links import LOOPBACK as LOOPBACK
from autopar.core.links import PCIE as PCIE
from autopar.core.links import DescribedDevice as DescribedDevice
from autopar.core.links import Link as Link
from autopar.core.mesh import AXIS_NAMES, Mesh, factorisations, runs_of
from autopar.core.slurm import torchrun_variables
from autopar.core.topology import Topology
from autopar.core.user_text import LONGEST_TOML, parse_toml, read_text
from autopar.errors import InputError, show_value
from autopar.units import show_bytes


@dataclass(frozen=True, slots=True, init=False)
class ClusterSpec:
    """`nodes` machines with `devices_per_node` devices each.

    `device` is "cpu" or a kind of GPU ("h100", "cuda"); `memory` is bytes per device, None for no
    cap. `intra` links devices of one node, `inter` devices of different nodes, `host` each GPU with the
    memory of its node, None for unknown; of `host_memory`, None for no cap, the node's devices may take that
    many bytes together. `cores` are those that the CPU devices of a node share, counted as containers count
    them (0.5 is half of one's time), None for as many as this machine has. Where devices are unlike,
    `places` has for each rank which of `groups` its device may be of: several for a rank of each stage.
    `topology` lays the links between nodes; without, each pair of nodes has its own.
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
    described: DescribedDevice | None
    groups: tuple[DeviceGroup, ...]
    places: tuple[tuple[int, ...], ...]
    topology: Topology | None

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
        described: DescribedDevice | None = None,
        groups: tuple[DeviceGroup, ...] = (),
        places: tuple[tuple[int, ...], ...] = (),
        topology: Topology | None = None,
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
        values = read_table("cluster", given, CLUSTER_KEYS, wrong)
        wrong += missing_inter(values.get("nodes", 1), inter) + needless_host(values, host)
        wrong += too_many(values) + other_nodes(values, topology)
        refuse("ClusterSpec", wrong)
        values["intra"] = intra or (LOOPBACK if values["device"] == "cpu" else PCIE)
        values["inter"], values["host"], values["described"] = inter, host, described
        values["groups"], values["places"] = groups, places
        values["topology"] = topology
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
    def of_groups(
        groups: Sequence[DeviceGroup], between: Sequence[GroupLink] = (), *, host: Link | None = None
    ) -> ClusterSpec:
        """The cluster of groups whose ranks follow each other; one of like devices if all groups are alike.

        Raises `InputError` with all violations at once: links between groups that are no tree, say.
        """
        wrong = check_groups(groups, between)
        refuse("ClusterSpec", wrong)
        size, count = node_size(groups, between), sum(group.num_devices for group in groups)
        standing = LOOPBACK if groups[0].device == "cpu" else PCIE
        inside = [group.intra or standing for group in groups if group.devices_per_node > 1]
        inside += [each.link for each in between if each.same_node]
        outside = [group.inter for group in groups if group.nodes > 1]
        outside += [each.link for each in between if not each.same_node]
        memories = [group.memory for group in groups if group.memory is not None]
        unlike = len({group.kind for group in groups}) > 1 or groups[0].speed != 1
        places = tuple((place,) for place, group in enumerate(groups) for _ in range(group.num_devices))
        return ClusterSpec(
            nodes=count // size,
            devices_per_node=size,
            device=groups[0].device,
            memory=min(memories, default=None),
            intra=slowest(inside),
            inter=slowest(outside) if count > size else None,
            host=host,
            described=groups[0].described,
            groups=tuple(groups) if unlike else (),
            places=places if unlike else (),
        )

    @staticmethod
    def detect(environment: Mapping[str, str] = os.environ) -> ClusterSpec:
        """The cluster that torchrun or SLURM started this process on, its links estimated.

        Where torch.distributed is initialised ranks tell each other which GPUs they have, and unlike ones
        form groups; collective then. Before that all are taken for like this rank's.
        """
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
        here = _this_machine(per_node, nodes=world // per_node)
        devices = _found_devices(here)
        if len(set(devices)) < 2:
            return here
        inter = here.inter if here.nodes > 1 else None
        groups, between = groups_of_found(devices, per_node, intra=here.intra, inter=inter)
        return ClusterSpec.of_groups(groups, between, host=here.host)

    @staticmethod
    def from_toml(path: str | Path) -> ClusterSpec:
        """Read the tables `[cluster]`, `[links.intra]`, `[links.inter]`, `[links.host]` and `[device]`.

        [cluster]                       [links.intra]
        nodes = 2                       bandwidth = "450GB/s"
        devices_per_node = 4            latency = "2us"
        device = "h100"
        memory = "80GB"                 [links.inter] likewise; needed if nodes > 1
        host_memory = "1TB"             [links.host] likewise: from a GPU to its node's memory

        [device]                        of a GPU that isn't known by name
        flops = {bf16 = "400TFLOP/s"}   or one rate for all dtypes
        bandwidth = "2TB/s"

        Instead of both a link may have `points = [["1kB", "10us"], ["1MB", "90us"]]`, measured messages.
        With `cards = 2` in [links.inter] the devices of a node share two network cards of its bandwidth.
        `topology = "ring"` there, or another of `core/topology.py`, says how the links are laid.

        Of unlike devices there are tables `[[groups]]` instead of `[cluster]`, with `[[links.between]]`.

        Bandwidths count bytes or bits: "200Mbit/s" is "25MB/s". A cluster of CPUs may say `cores` too;
        `host_memory` and the link to it serve offload, and are left out where unknown.

        Raises `InputError` with all violations at once.
        """
        try:
            text = read_text(path, longest=LONGEST_TOML)
            document = parse_toml(text)
        except ValueError as cause:
            raise InputError(
                where=str(path),
                found=str(cause),
                wanted="a readable TOML file",
                remedy="see docs/clusters.md for a cluster file",
            ) from cause
        lines = line_numbers(text)
        if "groups" not in document:
            return ClusterSpec(**cluster_values(str(path), document, lines))
        groups, between, host = cluster_groups(str(path), document, lines)
        return ClusterSpec.of_groups(groups, between, host=host)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Device type in torch's words: "cpu" or "cuda"."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def devices(self) -> str:
        """Count and kind of devices: `2 x 4 h100` are two nodes of four."""
        if self.groups:
            present = sorted({place for places in self.places for place in places})
            return " + ".join(str(self.groups[place]) for place in present)
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
            for shape in factorisations(self.num_devices, num_axes)
            if self.nodes == 1 or self.devices_per_node % math.prod(shape[1:]) == 0
        )

    def link(self, mesh: Mesh, axis: int) -> Link:
        """The slowest link that groups along `axis` use: `inter` if any of them crosses nodes."""
        self.check_world(mesh.num_devices)
        return self.inter if self.inter and self.nodes_of(mesh, (axis,)) > 1 else self.intra

    def nodes_of(self, mesh: Mesh, axes: Sequence[int]) -> int:
        """Most nodes that a group along `axes` spans."""
        self.check_world(mesh.num_devices)
        return runs_of(mesh.shape, tuple(sorted(axes)), self.devices_per_node)

    def stage(self, count: int, *, asked: str = "--stages") -> ClusterSpec:
        """The part that one of `count` pipeline ranks has: equally many devices, of one node or of whole
        nodes. Raises `InputError`, by the name of what `asked` for it, if the cluster can't be cut so.
        """
        devices, rest = divmod(self.num_devices, max(count, 1))
        inside = devices and self.devices_per_node % devices == 0
        if count < 1 or rest or not (inside or devices % self.devices_per_node == 0):
            raise InputError(
                where=asked,
                found=f"{count} for {self.nodes} nodes of {self.devices_per_node} devices",
                wanted="a number that cuts the cluster into equal parts of a node, or of whole nodes",
                remedy=f"choose a divisor of {self.num_devices}",
            )
        part = self._part(devices // self.devices_per_node or 1, devices if inside else self.devices_per_node)
        if not self.groups:
            return part
        blocks = self._blocks(devices)
        places = tuple(tuple(sorted({*chain.from_iterable(each)})) for each in zip(*blocks, strict=True))
        return replace(part, groups=self.groups, places=places)

    def blocks(self, count: int) -> tuple[ClusterSpec, ...]:
        """Each of the `count` parts that follow each other, with its own groups and their least memory; one
        for all where devices are alike. Raises `InputError` as `stage` does."""
        part = self.stage(count)
        if not self.groups:
            return (part,) * count
        return tuple(
            replace(part, places=places, memory=self._least_memory(places))
            for places in self._blocks(part.num_devices)
        )

    def slice(self, first: int, devices: int) -> ClusterSpec:
        """Some devices from number `first` on, within a node or of whole nodes, with their own groups."""
        nodes = max(1, devices // self.devices_per_node)
        part = self._part(nodes, devices // nodes)
        if not self.groups:
            return part
        places = self.places[first : first + devices]
        return replace(part, groups=self.groups, places=places, memory=self._least_memory(places))

    def _blocks(self, devices: int) -> list[tuple[tuple[int, ...], ...]]:
        return [self.places[start : start + devices] for start in range(0, self.num_devices, devices)]

    def _least_memory(self, places: tuple[tuple[int, ...], ...]) -> int | None:
        """The least memory of a device of the groups that ranks at these `places` are of."""
        memories = (self.groups[number].memory for number in chain.from_iterable(places))
        return min((each for each in memories if each is not None), default=None)

    def shaped(self, nodes: int, devices_per_node: int) -> ClusterSpec:
        """A cluster of `nodes` nodes of `devices_per_node` devices like these, with the same links. Raises
        `InputError` if these are unlike."""
        if self.groups:
            raise InputError(
                where="cluster",
                found=f"{nodes * devices_per_node} devices like {self.devices}",
                wanted="a number of devices of one kind",
                remedy="write the groups of the other cluster into a file of its own",
            )
        return self._part(nodes, devices_per_node)

    def _part(self, nodes: int, devices_per_node: int) -> ClusterSpec:
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
            described=self.described,
            topology=self.topology if nodes > 1 else None,
        )

    def of_group(self, number: int) -> ClusterSpec:
        """The cluster if all its devices were of one group's kind."""
        group = self.groups[number]
        return replace(self, device=group.device, described=group.described, groups=(), places=())

    def with_more(self, number: int) -> ClusterSpec | None:
        """The cluster with one more node of a group, or device where all lie on one node.

        None where the group has but a part of a node among several."""
        group, inside = self.groups[number], self.nodes == 1
        size = 1 if inside else group.devices_per_node
        if not inside and size % self.devices_per_node:
            return None
        after = 1 + max(rank for rank, groups in enumerate(self.places) if number in groups)
        places = (*self.places[:after], *(((number,),) * size), *self.places[after:])
        nodes, devices = group.nodes, group.devices_per_node
        nodes, devices = (nodes, devices + 1) if inside else (nodes + 1, devices)
        grown = replace(group, nodes=nodes, devices_per_node=devices)
        groups = (*self.groups[:number], grown, *self.groups[number + 1 :])
        per_node = self.devices_per_node + 1 if inside else self.devices_per_node
        count = len(places) // per_node
        return replace(self, nodes=count, devices_per_node=per_node, groups=groups, places=places)

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

    def check_kinds(self, kinds: Sequence[str]) -> None:
        """Raise `InputError` unless the ranks found such kinds of devices, in their order, as their groups
        have. A kind that is described by its figures, or is any GPU, isn't known by name."""
        wrong = [
            (rank, kind, group)
            for rank, (kind, (number, *_)) in enumerate(zip(kinds, self.places, strict=True))
            if (group := self.groups[number]).described is None and group.device not in (kind, "cuda")
        ]
        if wrong:
            raise InputError(
                where="groups of the cluster",
                found=", ".join(f"rank {rank} on a {kind}" for rank, kind, _ in wrong[:4]),
                wanted=", ".join(f"{group.device} there, of group {group.name}" for _, _, group in wrong[:4]),
                remedy="start the ranks in the order of the groups, or correct the cluster's file",
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
        inter += f" ({self.topology})" if self.topology else ""
        host = f"; to the host {self.host}" if self.host else ""
        return f"{self.devices}{memory}{cores}; within a node {self.intra}{inter}{host}"


def _this_machine(num_processes: int, *, nodes: int) -> ClusterSpec:
    """`nodes` machines like this one, each with `num_processes` processes."""
    whole_number("number of processes", num_processes)
    import torch  # here, so that a text that names no cluster is told before torch is loaded

    inter = ETHERNET if nodes > 1 else None
    ram, host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_processes:
        device, host = gpu_kind(torch.cuda.get_device_name(0)), PCIE
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        device, memory = "cpu", ram // num_processes
    return ClusterSpec(
        nodes=nodes,
        devices_per_node=num_processes,
        device=device,
        memory=memory,
        inter=inter,
        host=host,
        host_memory=ram if host else None,
    )


def _found_devices(here: ClusterSpec) -> list[FoundDevice]:
    """Kind and memory of each rank's GPU; none of CPUs, or before ranks can tell each other."""
    import torch.distributed as dist

    told = here.device_type == "cuda" and dist.is_available() and dist.is_initialized()
    if not told or dist.get_world_size() != here.num_devices:
        return []
    found: list[Any] = [None] * here.num_devices
    dist.all_gather_object(found, (here.device, here.memory))
    return found


def _count_gpus() -> int:
    import torch  # here, so that a description of machines needs none

    return torch.cuda.device_count()


def gpu_kind(name: str) -> str:
    """The model in torch's name of a GPU: "NVIDIA H100 80GB HBM3" is an "h100"."""
    words = re.split(r"[\s-]+", name.lower())
    return next((word for word in words if any(map(str.isdigit, word))), "cuda")
