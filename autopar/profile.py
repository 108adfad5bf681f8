"""`autopar profile`: measure this machine's collectives, and a target's operators, into the database.

Collectives run on as many real processes as the cluster has, for every size of group that a mesh can
have; all groups of one size talk at the same time, as they do in a program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopar.cluster import ClusterSpec
from autopar.core.costs import Collective
from autopar.core.plan import Plan
from autopar.cost.model import setting_of
from autopar.errors import InputError
from autopar.planning import Request, measure_operators, search
from autopar.runtime import worker
from autopar.runtime.launch import run_function
from autopar.target import Target
from autopar.trace import trace
from autopar.units import show_bytes, show_seconds
from costdb.collective_profiler import measure_collective
from costdb.database import Database
from costdb.measurement import CollectiveMeasurement
from costdb.setting import Setting

SIZES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB: a straight line between each two
BUDGET = 0.1  # seconds for one collective at one size, beside its warm-up


class Bar(Protocol):
    """Shows progress; can be sent to another process."""

    def __call__(self, done: int, total: int, what: str) -> None: ...

    def shown(self) -> AbstractContextManager[object]: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured; `operators` are calls, and `plan` is the target's by these numbers."""

    database: str
    setting: Setting
    collectives: tuple[CollectiveMeasurement, ...]
    operators: int
    plan: Plan | None

    def as_dict(self) -> dict[str, Any]:
        """The profile as the command line's JSON shows it."""
        return {
            "database": self.database,
            "device": self.setting.fingerprint,
            "torch": self.setting.torch_version,
            "threads": self.setting.threads,
            "collectives": [
                {"kind": item.kind.value, "ranks": item.size, "bytes": item.nbytes, "seconds": item.seconds}
                for item in self.collectives
            ],
            "operators": self.operators,
            "step_seconds": self.plan.step_seconds if self.plan else None,
            "measured_share": self.plan.measured_share if self.plan else None,
        }

    def __str__(self) -> str:
        rows = [f"{self.database}: {self.setting.fingerprint}, {self.setting.threads} threads a process"]
        rows += [
            f"{item.kind.value:<14} over {item.size} ranks  "
            f"{show_bytes(item.nbytes):>9}  {show_seconds(item.seconds):>9}"
            for item in self.collectives
        ]
        if self.plan:
            rows.append(
                f"{self.operators} operator calls; a step will take {show_seconds(self.plan.step_seconds)}, "
                f"{self.plan.measured_share:.0%} of its compute measured"
            )
        return "\n".join(rows)


def profile(
    cluster: ClusterSpec, database: Database, *, target: Target | None = None, request: Request, bar: Bar
) -> Profile:
    """Measure and store; raises InputError for a cluster that is not this machine's CPU."""
    cluster.check_local()
    if cluster.device_type != "cpu":
        raise InputError(
            where="--cluster",
            found=str(cluster),
            wanted="processes on the CPU",
            remedy="GPUs are priced by their data sheets and the cluster's links",
        )
    setting = setting_of(cluster)
    found: tuple[CollectiveMeasurement, ...] = ()
    if cluster.num_devices > 1:
        found = tuple(
            run_function(measure_rank, cluster.num_devices, group_sizes(cluster), setting.threads, bar)[0]
        )
        database.write_collectives(setting, found)
    if target is None:
        return Profile(str(database.path), setting, found, 0, None)
    graph = trace(target.model, target.args, target.kwargs, loss_fn=target.loss_fn).graph
    with bar.shown():
        count = measure_operators(graph, cluster, request, database=database, progress=bar)
        plan = search(
            graph, cluster, replace(request, alternatives=False), database=database, progress=bar
        ).plan
    return Profile(str(database.path), setting, found, count, plan)


def group_sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Every number of ranks that one or more axes of some mesh have together."""
    found = {
        math.prod(chosen)
        for mesh in cluster.meshes()
        for count in range(1, len(mesh.shape) + 1)
        for chosen in itertools.combinations(mesh.shape, count)
    }
    return tuple(sorted(found))


def measure_rank(sizes: Iterable[int], threads: int, bar: Bar) -> list[CollectiveMeasurement]:
    """One rank's part of measuring; the same numbers on every rank of a group."""
    torch.set_num_threads(threads)
    worker.init()
    groups = [(size, _group(size)) for size in sizes]
    jobs = [(size, group, kind, nbytes) for size, group in groups for kind in Collective for nbytes in SIZES]
    found = []
    with bar.shown() if dist.get_rank() == 0 else nullcontext():
        for number, (size, group, kind, nbytes) in enumerate(jobs):
            if dist.get_rank() == 0:
                bar(number, len(jobs), f"{kind.value} of {show_bytes(nbytes)} over {size}")
            found.append(measure_collective(kind, nbytes, group, budget=BUDGET))
            dist.barrier()
    return found


def _group(size: int) -> Any:
    """This rank's group of `size` neighbours."""
    starts = range(0, dist.get_world_size(), size)
    mine, _ = dist.new_subgroups_by_enumeration([list(range(start, start + size)) for start in starts])
    return mine
