"""`autopar explain`: why a plan is as it is, by solving what it is not.

plan ── its mesh, stages and micro-batches ── solved again ──┬── with layers pinned to something else
                                                             ├── without the memory cap, and with more
                                                             └── under other circumstances (planned anew)

All of that takes as long as it is given. What was asked comes first: circumstances, then layers, what binds,
and data parallelism; what is left when time is over says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.core.schedule import ScheduleKind
from autopar.cost.machine.model import CostModel
from autopar.errors import InfeasibleError, InputError
from autopar.explaining import constraints
from autopar.explaining.asked import LEAST_ALTERNATIVES_SECONDS, SHARE_OF_REST, AskedPlan
from autopar.explaining.data_parallel import why_not
from autopar.explaining.infeasible import remedies
from autopar.explaining.layers import DEAREST, MOST_WAYS, WAYS_OF_SEVERAL_LAYERS, WAYS_SECONDS, Alternatives
from autopar.explaining.what_if import more_of_groups, read, what_if
from autopar.planning.graphs.fitting import as_planned
from autopar.planning.group_orders import unlike_blocks
from autopar.planning.links import link_notes
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.shares import PACE
from autopar.results.explanation.explanation import Explanation, LayerChoices, Outcome
from autopar.results.plan.plan import Plan
from autopar.schedules.unflushed import unflushed_seconds
from autopar.units import show_seconds
from costdb.database import Database

SOLVING_ROUNDS = 3  # of measuring what was solved and solving it again, at most


def explained(
    asked: AskedPlan,
    layer: str | None = None,
    circumstances: Sequence[str] = (),
    *,
    seconds: float | None = None,
) -> Explanation:
    """The explanation of a plan, of one `layer` or of its dearest ones, under `circumstances` besides.

    What is solved beside the plan takes about so many `seconds`.
    Raises InputError for a layer that the plan doesn't have, and for circumstances that say nothing; what
    `autopar.plan` raises, unless no plan meets the memory cap: then the explanation says what to change.
    """
    for text in circumstances:
        read(text)
    name, cluster = asked.target.source, str(asked.cluster)
    begun = time.monotonic()
    try:
        plan = asked.plan(alternatives=True)
    except InfeasibleError as error:
        asked = waiting(asked, begun, seconds)
        if error.least is None and asked.options.get("memory") is None and asked.cluster.memory is None:
            raise
        others = tuple(what_if(asked, text) for text in circumstances)
        found = tuple(remedies(asked, error))
        return Explanation(
            name,
            cluster,
            None,
            infeasible=f"{error.found}; wanted {error.wanted}",
            remedies=found,
            what_if=others,
        )
    asked = waiting(asked, begun, seconds)
    others = (*(what_if(asked, text) for text in circumstances), *more_of_groups(asked))
    alternatives, base, layers = solved_again(asked, plan, layer)
    return Explanation(
        name,
        plan.cluster,
        plan,
        base=Outcome.of(base),
        layers=tuple(layers),
        memory=tuple(constraints.memory(alternatives, base)),
        options=tuple(constraints.options(asked)),
        data_parallel=why_not(asked, plan),
        what_if=others,
        notes=(
            *link_notes(asked.cluster, alternatives.problem.model.collectives),
            *(note for note in plan.notes if PACE in note),
            *stale_notes(plan),
        ),
    )


def stale_notes(plan: Plan) -> Iterator[str]:
    """What a pipeline that isn't flushed would take, where its schedule goes on over a step's border."""
    if plan.pipeline.is_staged and plan.pipeline.schedule is ScheduleKind.ONE_F_ONE_B and plan.stage_costs:
        seconds = unflushed_seconds(plan.pipeline, plan.stage_costs)
        yield (
            f"updates=stale(1) would take {show_seconds(seconds)} a step in place of "
            f"{show_seconds(plan.step_seconds)}, in steady state, by predictions; gradients are then of "
            "weights one step old, which isn't the serial program"
        )


def waiting(asked: AskedPlan, begun: float, seconds: float | None) -> AskedPlan:
    """The asked plan with a deadline for further plans: after `seconds`, or by default as long as the first
    plan took."""
    now = time.monotonic()
    return replace(
        asked, until=now + (max(LEAST_ALTERNATIVES_SECONDS, now - begun) if seconds is None else seconds)
    )


def solved_again(
    asked: AskedPlan, plan: Plan, layer: str | None
) -> tuple[Alternatives, Plan, list[LayerChoices]]:
    """A plan's own program with its layers split otherwise. Where operators are measured meanwhile the plan
    is solved again as well, with what is known then."""
    problem, until = problem_of(asked, plan), math.inf if asked.until is None else asked.until
    patience = max(0.0, min(WAYS_SECONDS, SHARE_OF_REST * (until - time.monotonic())))
    request = problem.request
    measuring = request.measure and problem.model.here
    with Database.open(asked.options.get("costdb")) as database:
        for number in range(SOLVING_ROUNDS):
            alternatives = Alternatives(problem, asked.cluster, patience, until=until)
            base = alternatives.base() if measuring else plan
            layers = chosen_layers(alternatives, base, layer)
            if not measuring or number + 1 == SOLVING_ROUNDS or alternatives.is_over:
                break
            model = problem.model.measure(alternatives.calls, database, asked.progress)
            if model is problem.model:
                break
            problem = MeshProblem(
                problem.graph,
                problem.mesh,
                problem.cluster,
                model,
                request,
                problem.cap,
                problem.hop,
            )
    return alternatives, base, layers


def problem_of(asked: AskedPlan, plan: Plan) -> MeshProblem:
    """The problem that the plan is an answer to, with what is known of operators' seconds by now."""
    if plan.programs:
        raise InputError(
            where="autopar explain",
            found=f"stages on meshes {plan.mesh_name}",
            wanted="a plan whose stages have one mesh",
            remedy="give all stages one mesh, or leave out --mesh",
        )
    request = replace(asked.request()[0].settled(plan), alternatives=False)
    target, whole = asked.target, asked.cluster
    traced = asked.planner(request).trace_step(target.model, target.args, target.kwargs)
    graph = as_planned(traced, plan).graph
    with Database.open(asked.options.get("costdb")) as database:
        model = CostModel.of(whole, database)
    cluster, hop = whole.stage(request.pipeline_ranks), model.hop(whole, request.pipeline_ranks)
    blocks = unlike_blocks(whole, request)
    cap = request.cap(cluster) if blocks else plan.memory_cap
    return MeshProblem(graph, plan.mesh, cluster, model, request, cap, hop, blocks)


def chosen_layers(alternatives: Alternatives, base: Plan, layer: str | None) -> list[LayerChoices]:
    """The named layer's operators with products, or its dearest; without a name the plan's dearest ones."""
    if layer is None:
        every = range(len(base.layers))
        indices = alternatives.dearest(base, every, DEAREST)
        return [alternatives.explained(index, base, WAYS_OF_SEVERAL_LAYERS) for index in indices]
    named = alternatives.named(layer)
    heavy = [index for index in named if base.layers[index].flops] or named
    indices = alternatives.dearest(base, heavy, DEAREST)
    most = MOST_WAYS if len(indices) == 1 else MOST_WAYS // 2
    return [alternatives.explained(index, base, most) for index in sorted(indices)]
