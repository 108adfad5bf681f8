"""Predicted peak bytes of plans beside those of real training steps.

    python -m tests.benchmarks.memory                  all cases, some minutes
    python -m tests.benchmarks.memory gpt              those whose name begins so

Every case is planned without measurements and takes `WARM_UPS` steps on gloo processes of this machine,
the optimizer's included; then gradients, its state and what is kept from step to step are there. Of one
more step each rank counts the bytes of all tensor storages alive (`autopar.runtime.peak`), and of yet
another how far the resident set of the process grows, which also knows what kernels need inside, and
pages that were freed and not given back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from autopar.cluster import ClusterSpec
from autopar.comparing.measured import Contest, ContestJob
from autopar.comparing.measured_peak import peak_bytes
from autopar.core.graph import Graph, GraphInput, InputKind
from autopar.core.placement import Layout, R, Shard
from autopar.planning.asked.options import Options
from autopar.planning.asked.request import Request, request_of
from autopar.planning.planner import Planner
from autopar.results.comparison.comparison import Row
from autopar.results.plan.plan import Plan
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.target import load_target
from autopar.units import show_bytes
from tests.pool import Pool

WARM_UPS = 2
ATOMS = 3  # of a fused projection: q, k and v, heads, their size
TIMEOUT = 300.0  # seconds for a case
KINDS = ("batch", "domain", "filter", "channel")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
TARGETS = Path(__file__).with_name("targets.py")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the largest resident set so far becomes the present one


@dataclass(frozen=True, slots=True)
class Case:
    """A plan for a function of `targets.py` on some processes; `options` are those of `autopar.plan`.

    With `sharded` every weight is stored in shards of its first dim over axis 0, where that divides it.
    """

    target: str
    processes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    sharded: bool = False

    @property
    def name(self) -> str:
        said = [str(value) for value in self.options.values()]
        return " ".join([self.target, str(self.processes), *said, *["shards"] * self.sharded, self.optimizer])

    @property
    def source(self) -> str:
        return f"{TARGETS}:{self.target}"

    def plan(self) -> Plan:
        """By estimates alone; raises what `autopar.plan` raises."""
        cluster, target, request = self.cluster, load_target(self.source), self.request
        traced = Planner(cluster, request, target.loss_fn).trace_step(
            target.model, target.args, target.kwargs
        )
        if self.sharded:
            request = replace(request, stored=dict(_shards(traced.graph, request)))
        return Planner(cluster, request, target.loss_fn).find(traced.graph, request)

    @property
    def cluster(self) -> ClusterSpec:
        return ClusterSpec.local(self.processes)

    @property
    def request(self) -> Request:
        options: dict[str, Any] = {"schedule": "1f1b", "recompute": "none", **self.options}
        asked = Options(**{"optimizer": self.optimizer, "measure": False, **options})
        request, _ = request_of(asked, self.cluster)
        return replace(request, alternatives=False)


def _shards(graph: Graph, request: Request) -> Iterator[tuple[str, Layout]]:
    """Of every weight the first dim over axis 0, by its first part that divides it evenly."""
    assert request.mesh is not None, "say the mesh"
    dims, rest = Dims(graph, find_atoms(graph), request.mesh), (R,) * (len(request.mesh.shape) - 1)
    for item in graph.inputs:
        if item.kind is InputKind.PARAMETER:
            yield item.target, next(filter(partial(_is_even, dims, item), _split(rest)), (R, *rest))


def _split(rest: Layout) -> Iterator[Layout]:
    return ((Shard(0, atom), *rest) for atom in range(ATOMS))


def _is_even(dims: Dims, item: GraphInput, layout: Layout) -> bool:
    """Whether all ranks' parts are as long, as a DTensor has them."""
    if not item.spec.shape or not dims.legal(item.name, layout):
        return False
    mesh = dims.mesh
    lengths = {
        dims.local_shape(item.name, layout, mesh.coordinate(rank))[0] for rank in range(mesh.num_devices)
    }
    return lengths == {item.spec.shape[0] // mesh.shape[0]}


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one rank at the peak of a step: of tensors' storages, and what its resident set grew by."""

    storages: int
    resident: int


def measure(case: Case, plan: Plan) -> Measured:
    """On a worker."""
    target = load_target(case.source)
    contest = Contest(ContestJob(case.source, case.cluster, case.request, case.optimizer, None, None), target)
    trainer = contest.trainer(Row(case.name, plan, None))
    before = _status("VmRSS")
    for _ in range(WARM_UPS):
        trainer.step()
    storages = peak_bytes(trainer.step, trainer.tensors(), contest.device)
    dist.barrier()
    CLEAR.write_text(RESET_PEAK)
    trainer.step()
    return Measured(storages, _status("VmHWM") - before)


def _status(name: str) -> int:
    """A figure of this process in bytes, by its name in proc(5)."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def run(case: Case, pool: Pool) -> tuple[Plan, list[Measured]]:
    """The plan of the case and what each rank measured."""
    plan = case.plan()
    return plan, pool.run(measure, case, plan, timeout=TIMEOUT)


def cases() -> Iterator[Case]:
    """Both examples in every kind of plan, as they are and larger."""
    two, four = {"mesh": "2"}, {"mesh": "2x2"}
    for target in ("gpt", "unet"):
        for kind in KINDS:
            yield Case(target, 2, two | {"force": kind})
        yield Case(target, 4, four | {"force": "batch+filter"}, "sgd")
        yield Case(target, 4, four | {"force": "batch+domain"}, "sgd-momentum")
        yield Case(target, 4, {"mesh": "4", "force": "domain"})
        yield Case(target, 4, {}, "adam")
        yield Case(target, 2, two | {"force": "batch", "micro_batches": 4})
        yield Case(target, 2, two | {"force": "batch", "recompute": "all"})
        yield Case(target, 2, two | {"force": "domain", "recompute": "all"})
        for schedule in SCHEDULES:
            yield Case(target, 2, {"stages": 2, "micro_batches": 4, "schedule": schedule})
        for schedule in ("1f1b", "zb1p"):
            options = {"stages": 2, "micro_batches": 4, "schedule": schedule, "recompute": "all"}
            yield Case(target, 2, options)
        yield Case(target, 4, two | {"force": "batch", "stages": 2, "micro_batches": 4})
    yield Case("gpt_wide", 2, two | {"force": "batch"})
    yield Case("gpt_wide", 2, two | {"force": "batch"}, sharded=True)
    yield Case("gpt_wide", 2, {"stages": 2, "micro_batches": 4, "schedule": "gpipe"})
    yield Case("unet_full", 2, two | {"force": "domain"}, "sgd-momentum")


@dataclass(frozen=True, slots=True)
class Result:
    """Bytes of the fullest rank, predicted and measured."""

    case: Case
    predicted: int
    storages: int
    resident: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.storages


def compare(case: Case, pool: Pool) -> Result:
    """Plan and run."""
    plan, found = run(case, pool)
    return Result(
        case,
        plan.peak_bytes,
        max(each.storages for each in found),
        max(each.resident for each in found),
    )


def main(prefix: str = "") -> None:
    """Print the table of the cases whose name begins so."""
    pools = {processes: Pool(processes) for processes in (2, 4)}
    table = Table("case", "predicted", "measured", "ratio", "resident set")
    try:
        for case in cases():
            if case.name.startswith(prefix):
                found = compare(case, pools[case.processes])
                sizes = [show_bytes(each) for each in (found.predicted, found.storages, found.resident)]
                table.add_row(case.name, *sizes[:2], f"{found.ratio:.3f}", sizes[2])
                print("   ".join([case.name, *sizes[:2], f"{found.ratio:.3f}", sizes[2]]), flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    Console(width=120).print(table)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
