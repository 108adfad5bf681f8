"""`autopar profile`: measure this machine's collectives, and a target's operators, into the database.

    rank 0   collectives ── operators of its plans ── plan by the new numbers
    rank 1   collectives ── the same operators

Everything runs on as many real processes as the cluster has, at the same time, as in a step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopar.cluster import ClusterSpec
from autopar.core.graph import Graph
from autopar.cost.machine import measure_collectives
from autopar.cost.machine.measuring import CoRunners
from autopar.cost.machine.model import is_here, network_of, setting_of
from autopar.errors import AutoparError, InputError
from autopar.planning.agree import agree
from autopar.planning.asked.ask import SearchMeans
from autopar.planning.asked.request import Request
from autopar.planning.losses import search_form
from autopar.planning.search import measure_operators
from autopar.results.files.text import html_of
from autopar.results.plan.plan import Plan
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import run_function
from autopar.trace.export import trace
from autopar.trace.target import Target, load_target
from autopar.units import show_bytes, show_seconds
from costdb.database import Database
from costdb.measurement import CollectiveMeasurement
from costdb.setting import Setting

SIZES = (1 << 10, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20)  # bytes of the full tensor
TIMEOUT = timedelta(minutes=10)


class ProgressDisplay(Protocol):
    """Shows progress; can be sent to another process."""

    def __call__(self, done: int, total: int, what: str) -> None: ...

    def shown(self) -> AbstractContextManager[object]: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """Results of profiling: `operators` is the number of calls, `plan` the target's plan by these numbers."""

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

    def _repr_html_(self) -> str:
        return html_of(self)


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """The job that every rank of a profile receives; `source` is the target's, None for collectives only."""

    cluster: ClusterSpec
    points: list[measure_collectives.Point]
    database: str
    source: str | None
    request: Request
    bar: ProgressDisplay


def profile(
    cluster: ClusterSpec,
    database: Database,
    *,
    target: Target | None = None,
    request: Request,
    bar: ProgressDisplay,
) -> Profile:
    """Measure and store; raises InputError for a cluster of devices that this machine doesn't have."""
    cluster.check_local()
    if not is_here(cluster):
        raise InputError(
            where="--cluster",
            found=str(cluster),
            wanted="devices of this machine, which can be measured",
            remedy="write --cluster local:1; GPUs that aren't here are priced by their data sheets",
        )
    if target is not None:
        _graph(target, request, cluster)  # what cannot be traced is bad input, and no worker's failure
    points = measure_collectives.wanted(cluster, SIZES)
    job = ProfileJob(cluster, points, str(database.path), target.source if target else None, request, bar)
    found = run_function(profile_rank, cluster.num_devices, job)[0]
    if isinstance(found, AutoparError):
        raise found
    return found


def profile_rank(job: ProfileJob) -> Profile | AutoparError:
    """One rank's part; the same profile, or error, on every rank."""
    worker.init(job.cluster.device_type)
    setting = setting_of(job.cluster)
    torch.set_num_threads(setting.threads)
    first = dist.get_rank() == 0
    try:
        with job.bar.shown() if first else nullcontext():
            collectives = measure_collectives.measure(
                job.points, TIMEOUT, job.bar, device=job.cluster.device_type
            )
            return agree(lambda co_runners: _store(job, setting, collectives, co_runners), job.cluster)
    except AutoparError as error:
        return error


def _store(
    job: ProfileJob, setting: Setting, collectives: list[CollectiveMeasurement], co_runners: CoRunners
) -> Profile:
    """On rank 0: write the collectives, measure operators beside each other, and plan."""
    with Database.open(job.database) as database:
        database.write_collectives(network_of(job.cluster), collectives)
        empty = Profile(job.database, setting, tuple(collectives), 0, None)
        if job.source is None:
            return empty
        graph = _graph(load_target(job.source), job.request, job.cluster)
        count = measure_operators(
            graph, job.cluster, job.request, database=database, progress=job.bar, co_runners=co_runners
        )
        request = replace(job.request, alternatives=False)
        found = search_form(graph, job.cluster, request, SearchMeans(database, job.bar, co_runners))
    return replace(empty, operators=count, plan=found.plan)


def _graph(target: Target, request: Request, cluster: ClusterSpec) -> Graph:
    autocast = request.autocast(cluster)
    traced = trace(target.model, target.args, target.kwargs, loss_fn=target.loss_fn, autocast=autocast)
    return traced.graph
