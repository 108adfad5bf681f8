"""What is known about a cluster's speed: its roofline, its measurements, its collectives.

Planning for CPUs, whose nodes are machines like this one, and for GPUs of the kind that this machine has,
measures operator calls that are missing, but only those that the best plans use, the most important first
(measuring.py). What isn't measured follows from neighbours that are (neighbours.py), or else is an estimate,
times what estimates of the operator were off by: or the solver would flee from what is measured to what is
guessed. What is known of GPUs comes from their device file first, if there is one (costdb/devices).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

import torch

from autopar.cluster import ClusterSpec, Link, gpu_kind
from autopar.core.costs import DeviceModel, OperatorCost
from autopar.core.graph import Call
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.compute import cost, estimate
from autopar.cost.machine.devices import calibrate, described, device_model
from autopar.cost.machine.measuring import Budget, CoRunners, Measuring, Progress
from autopar.cost.machine.neighbours import Neighbours, Ratio, ratio
from autopar.cost.machine.threads import using_threads
from autopar.errors import InputError
from autopar.trace.backwards.custom_operator import CUSTOM
from costdb import device_file
from costdb.database import Database
from costdb.measurement import Measurement
from costdb.setting import Setting, fingerprint

# Doublings from which a GPU's seconds follow: no other process slows it, and no Python counts in them. Of the
# H100's file single calls are off by 5 % where neighbours are as near as a CPU's, by 10 to 15 % beyond.
FILED_NEAR = 6.0


@dataclass(frozen=True, slots=True)
class GroupPace:
    """What a group's devices do of what its kind does, and the costs on that kind, None for the first's."""

    speed: float
    model: CostModel | None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs on one kind of device; `here` says that this machine has such devices and can measure.

    `contention` multiplies compute where processes share cores: n processes with one thread each on
    fewer cores take turns.
    """

    device: DeviceModel
    measured: Mapping[str, Measurement]
    collectives: CollectiveTable
    contention: float = 1.0
    here: bool = False
    setting: Setting | None = None
    corrections: Mapping[str, Ratio] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()  # keys of calls that could not be measured
    of_file: bool = False  # all that is measured comes with autopar, in a device file
    neighbours: Neighbours | None = None
    slowdown: float = 1.0  # of a device that does less than its kind was measured to
    paces: tuple[GroupPace, ...] = ()  # of a cluster's unlike groups, the first being the model's own kind

    def cost(self, call: Call) -> OperatorCost:
        """The measured cost, else the estimate times what those of neighbours were off by, or those of this
        operator."""
        found = cost(call, self.device, self.measured)
        if found.measured:
            return found
        factors = self.neighbours.ratio(call) if self.neighbours else None
        forward, backward = factors or self.corrections.get(str(call.target), (1.0, 1.0))
        return OperatorCost(
            found.forward_seconds * forward,
            found.backward_seconds * backward,
            measured=False,
            interpolated=self.neighbours is not None and self.neighbours.is_near(call),
        )

    @staticmethod
    def of(cluster: ClusterSpec, database: Database | None, *, device_files: bool = True) -> CostModel:
        """Read what `database` knows about the cluster's devices, and `device_files` about GPUs."""
        if cluster.groups:
            return _of_groups(cluster, database, device_files=device_files)
        if cluster.device_type != "cpu":
            return _of_gpus(cluster, database, device_files=device_files)
        setting = busy_setting(cluster)
        with using_threads(setting.threads):
            device = calibrate("cpu", database)
        measured = database.operators(setting) if database else {}
        network = network_of(cluster)
        table = CollectiveTable.of(database.collectives(network), "gloo") if database else CollectiveTable({})
        contention = max(1.0, cluster.devices_per_node * setting.threads / _cores(cluster))
        neighbours = Neighbours(measured, device)
        return CostModel(device, measured, table, contention, True, setting, neighbours=neighbours)

    def of_group(self, number: int) -> CostModel:
        """The costs on the devices of one of the cluster's unlike groups."""
        pace = self.paces[number]
        model, slowdown = replace(pace.model or self, paces=()), 1 / pace.speed
        return replace(model, contention=model.contention * slowdown, slowdown=slowdown)

    def hop(self, cluster: ClusterSpec, ranks: int) -> Link:
        """The slowest link between neighbours of `ranks` pipeline ranks: as it was measured, else as the
        cluster says."""
        link = cluster.hop(ranks)
        line = self.collectives.message(nodes=2 if link is cluster.inter else 1)
        return Link(*line) if line else link

    def measure(
        self,
        calls: Iterable[Call],
        database: Database | None,
        progress: Progress | None = None,
        co_runners: CoRunners | None = None,
        budget: Budget | None = None,
    ) -> CostModel:
        """Measure the calls that are missing, in their order and as far as the budget goes, and store them;
        others, and calls that cannot run, stay estimates.

        `co_runners` lets the other ranks run the same calls at the same time: as in a step, memory and
        caches are shared.
        """
        missing = self.missing(calls)
        if not (self.here and missing and self.setting):
            return self
        setting, budget = self.setting, budget or Budget()
        found, refused = Measuring(
            [(call, self._seconds(call)) for call in missing.values()],
            self.device.kind,
            setting.threads,
            self.measured,
            budget,
            keep=lambda new: database.write_operators(setting, new) if database else None,
            progress=progress,
            co_runners=co_runners,
        ).run()
        if not found and not refused:
            return self
        for key in missing.keys() & found.keys():
            each, guess = found[key], estimate(missing[key], self.device)
            pair = (
                ratio(each.forward_seconds, guess.forward_seconds),
                ratio(each.backward_seconds, guess.backward_seconds),
            )
            budget.ratios.setdefault(str(missing[key].target), []).append(pair)
        measured = {**self.measured, **found}
        return replace(
            self,
            measured=measured,
            refused=self.refused | refused,
            neighbours=Neighbours(measured, self.device),
        ).corrected(budget)

    def missing(self, calls: Iterable[Call]) -> dict[str, Call]:
        """The calls by key that are to be measured: not the user's own Python, which other ranks may not
        have traced yet, nor views on a GPU."""
        return {
            call.key(): call
            for call in calls
            if call.key() not in self.measured and call.key() not in self.refused
            if call.target is not CUSTOM and (self.device.kind == "cpu" or self._seconds(call))
        }

    def corrected(self, budget: Budget) -> CostModel:
        """The model with corrections: the median error of each operator's estimates in one plan's
        measurements."""
        corrections = {
            target: (median(pair[0] for pair in pairs), median(pair[1] for pair in pairs))
            for target, pairs in budget.ratios.items()
        }
        return replace(self, corrections={**self.corrections, **corrections})

    def _seconds(self, call: Call) -> float:
        """Seconds of one run, forward and backward, on a machine that other processes share."""
        found = self.cost(call)
        return self.contention * (found.forward_seconds + found.backward_seconds)


def _of_groups(cluster: ClusterSpec, database: Database | None, *, device_files: bool) -> CostModel:
    """Cost model of the first group's kind, and of the kinds of the others."""
    kinds = [(group.device, group.described) for group in cluster.groups]
    models: dict[object, CostModel] = {}
    for number, kind in enumerate(kinds):
        if kind not in models:
            try:
                models[kind] = CostModel.of(cluster.of_group(number), database, device_files=device_files)
            except InputError as error:
                raise InputError(
                    where=f"group {cluster.groups[number].name}: {error.where}",
                    found=error.found,
                    wanted=error.wanted,
                    remedy="name the device that comes closest, or give the group flops and bandwidth",
                ) from error
    paces = tuple(
        GroupPace(group.speed, None if kind == kinds[0] else models[kind])
        for group, kind in zip(cluster.groups, kinds, strict=True)
    )
    return replace(models[kinds[0]], paces=paces)


def _of_gpus(cluster: ClusterSpec, database: Database | None, *, device_files: bool) -> CostModel:
    """Cost model of GPUs: by their device file, and for those that are here by the database."""
    by_hand = cluster.described
    device = described(cluster.device, by_hand) if by_hand else device_model(cluster.device, database)
    filed = device_files and not by_hand
    measured = device_file.operators_of(cluster.device.lower()) if filed else {}
    if not is_here(cluster):
        neighbours = _filed_neighbours(cluster.device.lower(), device) if measured else None
        return CostModel(device, measured, CollectiveTable({}), neighbours=neighbours, of_file=bool(measured))
    setting = setting_of(cluster)
    measured = {**measured, **(database.operators(setting) if database else {})}
    table = CollectiveTable.of(database.collectives(network_of(cluster)), "nccl") if database else None
    return CostModel(
        device,
        measured,
        table or CollectiveTable({}),
        here=True,
        setting=setting,
        neighbours=Neighbours(measured, device, FILED_NEAR),
    )


@cache
def _filed_neighbours(kind: str, device: DeviceModel) -> Neighbours:
    return Neighbours(device_file.operators_of(kind), device, FILED_NEAR)


def is_here(cluster: ClusterSpec) -> bool:
    """Whether this machine has the cluster's kind of device, so that it can measure them."""
    if cluster.device_type == "cpu":
        return True
    if cluster.described or not torch.cuda.is_available():
        return False
    return cluster.device.lower() in ("cuda", gpu_kind(torch.cuda.get_device_name()))


def setting_of(cluster: ClusterSpec) -> Setting:
    """Setting in which a process of such a cluster runs: on its share of a node's cores, with no more threads
    than this process has; or on its own GPU, to which threads don't matter."""
    if cluster.device_type != "cpu" and is_here(cluster):
        return Setting(fingerprint("cuda"), str(torch.__version__), 1)
    share = int(_cores(cluster) // cluster.devices_per_node)
    threads = min(torch.get_num_threads(), max(1, share))
    return Setting(fingerprint("cpu"), str(torch.__version__), threads)


def co_running(cluster: ClusterSpec) -> int:
    """Number of a node's processes that compute at the same time, each on its own cores."""
    return max(1, min(cluster.devices_per_node, int(_cores(cluster))))


def busy_setting(cluster: ClusterSpec) -> Setting:
    """Setting in which a CPU's operators are measured: in rounds, beside as many busy processes as share a
    node's caches and memory. Times of calls that run over and over by themselves aren't compared with these.
    """
    setting, count = setting_of(cluster), co_running(cluster)
    beside = f"; {count} busy" if count > 1 else ""
    return replace(setting, fingerprint=f"{setting.fingerprint}; in rounds{beside}")


def network_of(cluster: ClusterSpec) -> Setting:
    """Setting in which collectives were measured. Between nodes it names the cluster's links, which no
    machine can tell; on CPUs it says that they ran in rounds."""
    setting = setting_of(cluster)
    words = ["in rounds"] if cluster.device_type == "cpu" else []
    if cluster.nodes > 1:
        words.append(f"{cluster.nodes} x {cluster.devices_per_node}, {cluster.inter}")
        words += [str(cluster.topology)] if cluster.topology else []
    return replace(setting, fingerprint="; ".join([setting.fingerprint, *words]))


def _cores(cluster: ClusterSpec) -> float:
    """Cores of a node."""
    return cluster.cores if cluster.cores is not None else os.cpu_count() or 1
