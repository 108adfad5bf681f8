"""One rank of the benchmark of memory caps: plans under every cap, and some steps of each."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import ClusterSpec
from autopar.comparing.measured import TIMEOUT, Contest, ContestJob
from autopar.cost.machine.measuring import CoRunners
from autopar.errors import InfeasibleError
from autopar.planning.agree import agree, measure_links
from autopar.planning.asked.request import Request
from autopar.planning.planner import Planner
from autopar.results.comparison.comparison import Row
from autopar.results.plan.plan import Plan
from autopar.runtime.launch import worker
from autopar.trace.target import Target, load_target

OPTIMIZER = "adam"


@dataclass(frozen=True, slots=True)
class Tightened:
    """One cap: bytes and seconds as predicted and as measured; None where no plan fits."""

    target: str
    cap: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    gap: float | None = None
    recomputed: int = 0  # operators that are recomputed
    gathered: int = 0  # weights that lie in shards and are gathered
    least: int | None = None


def run_rank(source: str, cluster: ClusterSpec, costdb: str, count: int) -> list[Tightened]:
    """One rank's part: plan under `count` caps that can be met and one that can't, run every plan."""
    worker.init(cluster.device_type, TIMEOUT.total_seconds())
    measure_links(cluster, costdb, TIMEOUT)
    target = load_target(source)
    fastest = plan_under(None, target, cluster, costdb)
    contest = Contest(ContestJob(source, cluster, Request(), OPTIMIZER, costdb, None), target)
    most, least = fastest.peak_bytes, least_bytes(target, cluster, costdb)
    found = []
    for step in range(count + 1):
        cap = most - (most - least) * step // (count - 1)
        try:
            plan = plan_under(cap, target, cluster, costdb)
        except InfeasibleError as error:
            found.append(Tightened(source, cap, least=error.least))
            continue
        measured = contest.run([Row(str(cap), plan, None)])[str(cap)]
        found.append(
            Tightened(
                source,
                cap,
                predicted_bytes=plan.peak_bytes,
                measured_bytes=measured.nbytes,
                predicted_seconds=plan.step_seconds,
                measured_seconds=measured.seconds,
                gap=plan.gap,
                recomputed=sum(stop - first for first, stop in plan.program.recompute),
                gathered=len(plan.program.gatherings),
            )
        )
    return found


def least_bytes(target: Target, cluster: ClusterSpec, costdb: str) -> int:
    """The least memory that any plan was found to need."""
    try:
        return plan_under(1, target, cluster, costdb).peak_bytes
    except InfeasibleError as error:
        assert error.least is not None
        return error.least


def plan_under(cap: int | None, target: Target, cluster: ClusterSpec, costdb: str) -> Plan:
    """One plan for all ranks, measured by all; collective."""
    planner = Planner(cluster, Request(memory=cap, alternatives=False), target.loss_fn, costdb=costdb)
    graph = planner.trace_step(target.model, target.args, target.kwargs).graph

    def find(co_runners: CoRunners) -> Plan:
        return planner.find(graph, planner.request, co_runners)

    return agree(find, cluster)
