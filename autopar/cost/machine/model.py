"""What is known about a cluster's speed: its roofline, its measurements, its collectives.

Planning for CPUs, whose nodes are machines like this one, measures operator calls that are missing, but
only those that an estimated optimum uses; what estimates of an operator were off by then corrects the
others, or the solver would flee from what is measured to what is guessed. For GPUs the estimates stay,
and are marked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import geometric_mean, median

import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import Collective, DeviceModel, OperatorCost
from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.compute import cost, estimate
from autopar.cost.machine.devices import calibrate, device_model
from autopar.trace.custom_operator import CUSTOM
from costdb.database import Database
from costdb.measurement import Measurement
from costdb.profiler import measure_together, portions
from costdb.setting import Setting, fingerprint

OPERATOR_BUDGET = 0.05  # seconds for one operator call, beside its warm-up
# Timed with all that is measured: a product, and memory that is read and written.
YARDSTICKS = (
    Call(torch.ops.aten.mm.default, (TensorSpec((512, 512), torch.float32),) * 2, {}),
    Call(torch.ops.aten.neg.default, (TensorSpec((1 << 22,), torch.float32),), {}),
)
Progress = Callable[[int, int, str], None]  # done, all, what
CoRunners = Callable[[list[Call]], None]  # starts the measuring of these calls elsewhere


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs on one kind of device; `here` says that this machine has such devices and can measure.

    `contention` multiplies compute where processes share cores: n processes with one thread each on
    fewer cores take turns.
    """

    device: DeviceModel
    measured: dict[str, Measurement]
    collectives: CollectiveTable
    contention: float = 1.0
    here: bool = False
    setting: Setting | None = None
    corrections: dict[str, tuple[float, float]] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()  # keys of calls that could not be measured

    def cost(self, call: Call) -> OperatorCost:
        """The measured cost, else the estimate times what estimates of this operator were off by."""
        found = cost(call, self.device, self.measured)
        if found.measured or str(call.target) not in self.corrections:
            return found
        forward, backward = self.corrections[str(call.target)]
        return OperatorCost(
            found.forward_seconds * forward, found.backward_seconds * backward, measured=False
        )

    @staticmethod
    def of(cluster: ClusterSpec, database: Database | None) -> CostModel:
        """Read what `database` knows about the cluster's devices."""
        if cluster.device_type != "cpu":
            return CostModel(device_model(cluster.device, database), {}, CollectiveTable({}))
        setting = setting_of(cluster)
        with using_threads(setting.threads):
            device = calibrate("cpu", database)
        measured = database.operators(setting) if database else {}
        network = network_of(cluster)
        table = CollectiveTable.of(database.collectives(network), "gloo") if database else CollectiveTable({})
        contention = max(1.0, cluster.devices_per_node * setting.threads / _cores(cluster))
        return CostModel(device, measured, table, contention, True, setting)

    def hop(self, cluster: ClusterSpec, ranks: int) -> Link:
        """The slowest link between neighbours of `ranks` pipeline ranks: as it was measured, else as the
        cluster says."""
        link = cluster.hop(ranks)
        line = self.collectives.line(Collective.SEND_RECV, size=2, nodes=2 if link is cluster.inter else 1)
        return Link(*line) if line else link

    def measure(
        self,
        calls: Iterable[Call],
        database: Database | None,
        progress: Progress | None = None,
        co_runners: CoRunners | None = None,
    ) -> CostModel:
        """Measure the calls that are missing and store them; calls that cannot run stay estimates.

        `co_runners` lets the other ranks run the same calls at the same time: as in a step, memory and
        caches are shared.
        """
        missing = {
            call.key(): call
            for call in calls
            if call.key() not in self.measured and call.key() not in self.refused
            if call.target is not CUSTOM  # the user's own Python, which other ranks may not have traced yet
        }
        if not (self.here and missing and self.setting):
            return self
        missing = dict(sorted(missing.items()))  # so that what is alike is timed together
        if co_runners:
            co_runners(list(missing.values()))
        found = measure_calls(missing.values(), self.setting.threads, progress, self.measured)
        if database:
            database.write_operators(self.setting, found.values())
        ratios: dict[str, list[tuple[float, float]]] = {}
        for key in missing.keys() & found.keys():
            each, guess = found[key], estimate(missing[key], self.device)
            pair = (
                _ratio(each.forward_seconds, guess.forward_seconds),
                _ratio(each.backward_seconds, guess.backward_seconds),
            )
            ratios.setdefault(str(missing[key].target), []).append(pair)
        corrections = {
            target: (median(pair[0] for pair in pairs), median(pair[1] for pair in pairs))
            for target, pairs in ratios.items()
        }
        return replace(
            self,
            measured={**self.measured, **found},
            refused=self.refused | (missing.keys() - found.keys()),
            corrections={**self.corrections, **corrections},
        )


def measure_calls(
    calls: Iterable[Call],
    threads: int,
    progress: Progress | None = None,
    known: Mapping[str, Measurement] | None = None,
) -> dict[str, Measurement]:
    """Measurements by key, without those calls that cannot run.

    A machine that is shared, or grows warm, is faster at one time than at another. So that what is measured
    at different times can be compared, seconds are those of the time when `YARDSTICKS` took what is `known`
    of them, or else what they take first.
    """
    found: dict[str, Measurement] = {}
    done, calls, known = 0, list(calls), known or {}
    first = {key: known[key] for key in (each.key() for each in YARDSTICKS) if key in known}
    with using_threads(threads):
        for together in portions(calls):
            if progress:
                progress(done, len(calls), _named(together))
            timed = measure_together([*YARDSTICKS, *together], "cpu", budget=OPERATOR_BUDGET)
            now = {each.key: each for each in timed}
            yardsticks = {each.key(): now[each.key()] for each in YARDSTICKS}
            first = {**yardsticks, **first}
            pace = geometric_mean(
                first[key].forward_seconds / each.forward_seconds for key, each in yardsticks.items()
            )
            found |= {key: each.scaled(pace) for key, each in now.items() if key not in yardsticks}
            done += len(together)
    if progress:
        progress(len(calls), len(calls), "measured")
    return found | {key: each for key, each in first.items() if key not in known}


def _named(calls: Sequence[Call]) -> str:
    others = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    return f"{calls[0].target}{others}"


def setting_of(cluster: ClusterSpec) -> Setting:
    """How a process of a cluster of such machines runs: on its share of a node's cores, and never on more
    threads than this process has been given."""
    share = int(_cores(cluster) // cluster.devices_per_node)
    threads = min(torch.get_num_threads(), max(1, share))
    return Setting(fingerprint("cpu"), str(torch.__version__), threads)


def network_of(cluster: ClusterSpec) -> Setting:
    """Where collectives were measured: between nodes they depend on what links these, which nothing but
    the cluster's own words can tell."""
    setting = setting_of(cluster)
    if cluster.nodes == 1:
        return setting
    words = f"{cluster.nodes} x {cluster.devices_per_node}, {cluster.inter}"
    return replace(setting, fingerprint=f"{setting.fingerprint}; {words}")


def _cores(cluster: ClusterSpec) -> float:
    """Cores of a node."""
    return cluster.cores if cluster.cores is not None else os.cpu_count() or 1


def _ratio(measured: float, estimated: float) -> float:
    return measured / estimated if measured > 0 and estimated > 0 else 1.0


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Run torch with `count` threads, as the workers will."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
