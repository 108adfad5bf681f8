"""Other strategies beside the plan: every pure one on the same mesh, and one device by itself.

They say what the plan gains. A row says why its strategy has no plan, or why it isn't taken.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.cluster import ClusterSpec
from autopar.core.deadline import is_over
from autopar.core.force import PURE, Parallelism
from autopar.core.mesh import Mesh
from autopar.cost.machine.model import CostModel
from autopar.errors import AutoparError, InfeasibleError, InputError, SolverError, TraceError
from autopar.planning.asked.ask import Limits
from autopar.planning.asked.request import Request
from autopar.planning.first_plans import WholeBatch, fitted_step
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.report import pipeline_of
from autopar.planning.step_parts import step_parts
from autopar.results.plan.plan import ONE_DEVICE, Alternative
from autopar.solve.stages.step import Step
from autopar.units import show_bytes

LONGEST_REASON = 120  # characters of a reason
MUCH_SLOWER = 4.0  # times the plan: how such a strategy could be made to fit isn't looked into


def strategies_beside(problem: MeshProblem, limits: Limits) -> list[tuple[Alternative, Step | None]]:
    """Every pure strategy of the chosen mesh, solved without the cap so that its need is known. The plan's
    schedule alone is tried if none could make it faster than the plan (`incumbent`); none on one device,
    which has nothing to share."""
    found: list[tuple[Alternative, Step | None]] = []
    if problem.mesh.num_devices == 1:
        return found
    for kind in PURE:
        try:
            step = problem.plan(problem.ask(kind, bounded=False), limits)
        except (InfeasibleError, SolverError) as error:
            row = Alternative(kind.value, None, None, feasible=False, reason=reason_of(error))
            found.append((row, None))
            continue
        found.append((beside(problem, kind.value, step), step))
    return found


def within_the_cap(
    row: Alternative,
    problem: MeshProblem,
    batch: WholeBatch,
    cluster: ClusterSpec,
    plan: Step,
    limits: Limits,
) -> Alternative:
    """The row of a pure strategy, or a better one of its kind over all devices, without stages.

    It is better if it alone meets the cap, or if it is faster."""
    kind = Parallelism(row.name)
    asked = problem.request
    is_whole = asked.pipeline_ranks == 1 and asked.micro_batches == batch.counts[0]
    is_flat = is_whole and len(problem.mesh.shape) == 1
    too_slow = row.step_seconds is not None and row.step_seconds > MUCH_SLOWER * plan.seconds
    if (row.feasible and is_flat) or too_slow or is_over(limits.deadline):
        return row
    try:
        flat, step = fitted_step(problem, batch, kind, cluster, limits, cutoff=MUCH_SLOWER * plan.seconds)
    except (InfeasibleError, InputError, SolverError, TraceError):
        return row
    own = beside(flat, row.name, step)
    if not own.feasible or (
        row.feasible and row.step_seconds is not None and row.step_seconds <= step.seconds
    ):
        return row
    parts = flat.request.micro_batches
    told = f"mesh {flat.mesh}" + (f", {parts} micro-batches" if parts > 1 else "")
    return dataclasses.replace(own, reason=told + (", recomputing" if step.recomputes else ""))


def one_device(problem: MeshProblem, cluster: ClusterSpec, deadline: float | None) -> Alternative | None:
    """The step on one device of the cluster, the fastest of unlike ones, with as many micro-batches; None if
    the cluster has no more."""
    if cluster.num_devices == 1:
        return None
    numbers = range(len(cluster.groups))
    kinds = [(cluster.of_group(each), problem.model.of_group(each)) for each in numbers]
    rows = [_alone(problem, *kind, deadline) for kind in kinds or [(cluster, problem.model)]]
    return min(rows, key=lambda row: math.inf if row.step_seconds is None else row.step_seconds)


def _alone(
    problem: MeshProblem, cluster: ClusterSpec, model: CostModel, deadline: float | None
) -> Alternative:
    """The step on one of like devices."""
    shared = model.contention / model.slowdown / cluster.devices_per_node
    serial = MeshProblem(
        problem.graph,
        Mesh((1,)),
        cluster.stage(cluster.num_devices),
        dataclasses.replace(model, contention=model.slowdown * max(1.0, shared)),
        Request(
            training=problem.request.training,
            optimizer=problem.request.optimizer,
            micro_batches=problem.request.micro_batches,
            outputs=problem.request.outputs,
            recompute=problem.request.recompute,
        ),
        problem.cap,
        problem.hop,
    )
    try:
        step = serial.plan(serial.ask(bounded=False), Limits(deadline))
    except (InfeasibleError, SolverError) as error:
        return Alternative(ONE_DEVICE, None, None, feasible=False, reason=reason_of(error))
    return beside(serial, ONE_DEVICE, step)


def beside(problem: MeshProblem, name: str, step: Step) -> Alternative:
    """The row of a strategy that has a step."""
    room = step.cut.rooms[step.cut.fullest] if step.cut else 0
    fits = problem.cap is None or step.peak_bytes <= problem.cap + room
    pipeline = pipeline_of(problem.graph, step, problem.request)
    return Alternative(
        name,
        step.seconds,
        step.peak_bytes,
        feasible=fits,
        reason="" if fits else f"exceeds the memory cap of {show_bytes(problem.cap or 0)}",
        parts=step_parts(step, pipeline),
    )


def reason_of(error: AutoparError) -> str:
    """Short reason why a strategy has no plan."""
    text = f"{error.found}; wanted {error.wanted}"
    return text if len(text) <= LONGEST_REASON else error.found
