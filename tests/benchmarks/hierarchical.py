"""Cut and placement decided together, and one after the other, on the same costs.

    joint        placement for all devices ── cut by what a stage then takes           autopar.plan
    cut first    cut by the seconds of one device, nothing split ── placement for this cut
    by layers    as many operators in each stage                 ── placement for this cut

What comes first doesn't know what comes later: layers gain unequally from being split, so that stages that
are alike on one device each are not on several. All three choose among the same placements, and take a
pure strategy where that is faster.

Source: hierarchical searches are common; Zheng et al., Alpa, 2022, section 2, name what they miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum

from autopar.cluster import ClusterSpec
from autopar.core.graph import Call, Graph
from autopar.core.mesh import Mesh
from autopar.cost.machine.measuring import CoRunners
from autopar.errors import InfeasibleError
from autopar.planning.asked.ask import Limits, SearchMeans
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.search import MEASURING_ROUNDS, FoundPlan, MeshDecision, decide, finish
from costdb.database import Database


class Way(Enum):
    """What is decided in which order."""

    JOINT = "joint"
    CUT_FIRST = "cut first"
    BY_LAYERS = "by layers"


Outcome = FoundPlan | InfeasibleError


def decide_all(
    graph: Graph,
    cluster: ClusterSpec,
    request: Request,
    *,
    database: Database | None = None,
    co_runners: CoRunners | None = None,
) -> dict[Way, Outcome]:
    """What each way decides for `graph`, one of `request.micro_batches` micro-batches.

    The request names its stages and one mesh, and a schedule with one stage on each rank. Operators are
    measured until no way uses one that is not, where the cluster's devices can be measured. Raises what
    `decide` raises if the joint way finds nothing; the others' InfeasibleError is their outcome.
    """
    for _ in range(MEASURING_ROUNDS):
        joint = decide(graph, cluster, request, SearchMeans(database, co_runners=co_runners))
        found: dict[Way, Outcome] = {Way.JOINT: finish(joint)}
        for way, starts in cuts(joint.problem).items():
            found[way] = decide_after(joint, starts)
        model = joint.problem.model
        calls = [
            call for each in found.values() if isinstance(each, FoundPlan) for call in _calls(graph, each)
        ]
        if not request.measure or model.measure(calls, database, co_runners=co_runners) is model:
            break
    return found


def cuts(joint: MeshProblem) -> Mapping[Way, tuple[int, ...]]:
    """The first operators of stages where the cut comes before the placement."""
    stages, count = joint.request.pipeline_ranks, len(joint.graph.operators)
    serial = MeshProblem(
        joint.graph,
        Mesh((1,)),
        joint.cluster.stage(joint.cluster.num_devices),
        joint.model,
        replace(joint.request, mesh=None, memory=None),
        None,
        joint.hop,
    )
    cut = serial.plan(serial.ask()).cut
    assert cut is not None
    return {
        Way.CUT_FIRST: cut.starts,
        Way.BY_LAYERS: tuple(stage * count // stages for stage in range(stages)),
    }


def decide_after(joint: MeshDecision, starts: tuple[int, ...]) -> Outcome:
    """The best assignment for this cut."""
    same = joint.problem
    problem = MeshProblem(
        same.graph,
        same.mesh,
        same.cluster,
        same.model,
        same.request,
        same.cap,
        same.hop,
        places=(*starts, len(same.graph.operators)),
    )
    try:
        step = problem.plan(problem.ask(same.request.force, cap=same.cap), Limits(joint.deadline))
        return finish(replace(joint, problem=problem, step=step, others=math.inf))
    except InfeasibleError as error:
        return error


def _calls(graph: Graph, found: FoundPlan) -> Iterator[Call]:
    strategies = found.plan.program.strategies
    for item in graph.operators:
        yield from found.prices.operator(item, strategies[item.name]).calls
