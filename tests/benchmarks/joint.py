"""Deciding cut and placement together against one after the other: predicted and measured steps.

    plans      joint, cut first, by layers (hierarchical.py), on the same measured costs
    losses     of the first steps, equal to those of the serial model
    steps      of all plans in turn, each way's seconds over those of the joint one, pair by pair

Two stages of two ranks each, on gloo processes of one thread, every stage on cores of its own: on a machine
with fewer cores than ranks the ranks of one stage share one (decided.py), so that it takes its time whatever
the other stage does, as on devices.

The nets have few convolutions on large images, which gain from being split, and then many on small ones,
which gain little: what a split saves there, its messages take.

python -m tests.benchmarks.joint                      all nets, some minutes
python -m tests.benchmarks.joint narrow --rounds 40
python -m tests.benchmarks.joint --plan-only          predictions, also for larger nets on GPUs
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autopar.cluster import ClusterSpec, Link
from autopar.core.mesh import Mesh
from autopar.core.schedule import ScheduleKind
from autopar.planning.asked.request import Request
from autopar.results.plan.plan import Plan
from autopar.runtime.launch.launch import run_function
from autopar.trace.target import load_target
from autopar.units import show_bytes, show_seconds
from tests.benchmarks.allocators import ALLOCATORS, environment
from tests.benchmarks.decided import STATE, DecidedSteps, Trial, find_plans, run_rank
from tests.benchmarks.hierarchical import Way
from tests.benchmarks.statistics import Ratio, ratio

ROUNDS = 20
NETS = Path(__file__).with_name("joint_nets.py")
NVLINK, NETWORK = Link(2e-6, 450e9), Link(5e-6, 50e9)


@dataclass(frozen=True, slots=True)
class Subject:
    """A net (joint_nets.py) on a cluster in two stages; `memory` is the cap in bytes per device."""

    name: str
    net: str
    micro_batches: int
    memory: int | None = None
    cluster: ClusterSpec = ClusterSpec.local(4)

    def trial(self, rounds: int) -> Trial:
        request = Request(
            mesh=Mesh((self.cluster.num_devices // 2,)),
            memory=self.memory,
            pipeline_ranks=2,
            micro_batches=self.micro_batches,
            schedule=ScheduleKind.ONE_F_ONE_B,
            optimizer=STATE,
        )
        return Trial(f"{NETS}:{self.net}", self.cluster, request, rounds)


def gpus(nodes: int, devices: int) -> ClusterSpec:
    return ClusterSpec(
        nodes=nodes, devices_per_node=devices, device="h100", memory="80GB", intra=NVLINK, inter=NETWORK
    )


SUBJECTS = (
    Subject("narrow", "narrow", 4),
    Subject("wide", "wide", 4),
)
PAPER = (
    Subject("deep, 224", "deep_224", 8, cluster=gpus(2, 4)),
    Subject("deep, 224, 240 MB", "deep_224", 8, memory=240_000_000, cluster=gpus(2, 4)),
    Subject("deep, 512", "deep_512", 8, cluster=gpus(2, 8)),
    Subject("VGG-16", "vgg_16", 8, cluster=gpus(2, 4)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way on one subject, or its `refusal`. `slower` is its seconds over those of the joint way, `busier`
    the processor time of its busiest rank over that of the joint way's, `error` the largest of its losses."""

    subject: str
    way: str
    starts: tuple[int, ...] = ()
    module: str = ""  # with which the last stage begins
    stage_seconds: tuple[float, ...] = ()  # of one micro-batch
    predicted: float | None = None
    nbytes: int | None = None
    recomputed: int = 0  # operators that are recomputed
    measured_share: float = 0.0
    measured: float | None = None
    slower: Ratio | None = None
    busier: Ratio | None = None
    error: float | None = None
    refusal: str = ""


def evaluate(subject: str, found: DecidedSteps) -> Iterator[Row]:
    """The rows of one subject, the joint way first."""
    for way, plan in found.plans.items():
        if not isinstance(plan, Plan):
            yield Row(subject, way.value, refusal=f"infeasible: needs {show_bytes(plan.least or 0)}")
            continue
        row = Row(
            subject=subject,
            way=way.value,
            starts=plan.pipeline.starts,
            module=plan.stages[-1].first,
            stage_seconds=tuple(stage.forward + stage.backward for stage in plan.stages),
            predicted=plan.step_seconds,
            nbytes=plan.peak_bytes,
            recomputed=sum(stop - first for first, stop in plan.program.recompute),
            measured_share=plan.measured_share,
        )
        if found.timed is not None:
            wall, cpu = found.timed.seconds, found.timed.cpu_seconds
            row = replace(
                row,
                measured=median(wall[way.value]),
                slower=ratio(wall[way.value], wall[Way.JOINT.value]),
                busier=ratio(cpu[way.value], cpu[Way.JOINT.value]),
                error=found.errors[way.value],
            )
        yield row


def run(subject: Subject, rounds: int, costdb: str) -> list[Row]:
    """Plan and time one subject; on paper where the cluster is not of this machine's processors."""
    trial = subject.trial(rounds)
    if subject in PAPER:
        return list(
            evaluate(subject.name, DecidedSteps(find_plans(load_target(trial.source), trial, None), None, {}))
        )
    with environment(ALLOCATORS["tuned"]):
        return list(
            evaluate(subject.name, run_function(run_rank, trial.cluster.num_devices, trial, costdb)[0])
        )


def table(rows: Sequence[Row]) -> Table:
    names = (
        "net",
        "way",
        "last stage",
        "stages",
        "predicted",
        "",
        "measured",
        "ratio",
        "busiest rank",
        "peak",
    )
    found = Table(box=None)
    for name in (*names, "again"):
        found.add_column(name, justify="left" if name in ("net", "way") else "right")
    first: dict[str, float] = {}
    for row in rows:
        if row.predicted is None or row.nbytes is None:
            found.add_row(row.subject, row.way, row.refusal)
            continue
        found.add_row(
            row.subject,
            row.way,
            f"{row.module} ({row.starts[-1]})",
            " + ".join(f"{1e3 * seconds:.2f}" for seconds in row.stage_seconds) + " ms",
            show_seconds(row.predicted),
            f"{row.predicted / first.setdefault(row.subject, row.predicted):.3f}",
            show_seconds(row.measured) if row.measured else "",
            _figure(row.slower),
            _figure(row.busier),
            show_bytes(row.nbytes),
            str(row.recomputed),
        )
    return found


def _figure(found: Ratio | None) -> str:
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]" if found else ""


def main(
    names: Annotated[list[str] | None, typer.Argument(help="nets whose names start so")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="paired steps of each")] = ROUNDS,
    plan_only: Annotated[bool, typer.Option(help="predict, and take no steps")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
    costdb: Annotated[str | None, typer.Option(help="a cost database to go on with")] = None,
) -> None:
    """Compare what is decided together with what is decided one after the other."""
    subjects = (*SUBJECTS, *PAPER) if plan_only else SUBJECTS
    chosen = [item for item in subjects if not names or any(item.name.startswith(name) for name in names)]
    if not chosen:
        raise typer.BadParameter(f"nets: {', '.join(item.name for item in subjects)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="autopar-joint-") as folder:
        for subject in chosen:
            found = run(subject, 0 if plan_only else rounds, costdb or str(Path(folder) / "costs.sqlite"))
            rows += found
            Console(stderr=as_json, width=150).print(table(found))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    typer.run(main)
