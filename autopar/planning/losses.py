"""Whether a step's last product and its loss run in pieces, where the planner chooses.

    whole logits ── fit as the fastest step has them ────────────────── whole
         └───────── slower for want of memory, or nothing fits ── in pieces, if that is faster

The second search begins only where pieces spare a part of the cap that matters, on a device, of a
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cluster import ClusterSpec
from autopar.core.graph import Graph
from autopar.core.loss_pieces import LossPieces
from autopar.errors import InfeasibleError, SolverError
from autopar.planning.asked.ask import NO_MEANS, SearchMeans
from autopar.planning.asked.request import Request
from autopar.planning.search import FoundPlan, MeshDecision, decide, finish
from autopar.results.plan.plan import Plan
from autopar.trace.export import Traced
from autopar.trace.forms.linear_loss import LINEAR_LOSS
from autopar.trace.rewrites.losses_in_pieces import with_losses_in_pieces

LEAST_SPARED = 0.05  # of the cap: less changes a plan by less than predictions are off


def other_form(graph: Graph, request: Request, cluster: ClusterSpec, micro_batches: int = 1) -> Graph | None:
    """The graph with its losses in pieces, where the planner may choose that; None where it spares little.

    `graph` is that of all the `micro_batches`.
    """
    cap = request.cap(cluster)
    if request.loss_pieces is not LossPieces.AUTO or request.pins or cap is None:
        return None
    pieces = with_losses_in_pieces(graph)
    spared = sum(graph.specs[name].nbytes for name in graph.specs.keys() - pieces.specs.keys())
    return pieces if spared / (cluster.num_devices * micro_batches) > LEAST_SPARED * cap else None


def search_form(
    graph: Graph, cluster: ClusterSpec, request: Request, means: SearchMeans = NO_MEANS
) -> FoundPlan:
    """The best plan of a graph, or of it with losses in pieces where memory slows the former down.

    Raises what `search` raises for the form that needs less."""

    def decided(graph: Graph, cutoff: float) -> MeshDecision:
        return decide(graph, cluster, request, means, cutoff=cutoff)

    return finish(_decide_form(decided, graph, request, cluster))


def _decide_form(
    decide: Callable[[Graph, float], MeshDecision], graph: Graph, request: Request, cluster: ClusterSpec
) -> MeshDecision:
    """What is decided for the better form; `decide` takes the seconds that a step has to beat."""
    pieces = other_form(graph, request, cluster.stage(request.pipeline_ranks))
    if pieces is None:
        return decide(graph, math.inf)
    try:
        whole = decide(graph, math.inf)
    except InfeasibleError:
        return decide(pieces, math.inf)
    if whole.unhindered:
        return whole
    try:
        other = decide(pieces, whole.step.seconds)
    except (InfeasibleError, SolverError):
        return whole
    return other if other.step.seconds < whole.step.seconds else whole


def find_form(find: Callable[[LossPieces], Plan], is_other: Callable[[int], bool]) -> Plan:
    """The plan that is found with whole logits, or in pieces where memory slows the former down.

    `is_other` says whether pieces spare something that matters of so many micro-batches.
    """
    if not is_other(1):
        return find(LossPieces.NONE)
    try:
        whole = find(LossPieces.NONE)
    except InfeasibleError:
        return find(LossPieces.ALL)
    slowed = whole.program.recompute or whole.program.offload or whole.pipeline.micro_batches > 1
    if not slowed or not is_other(whole.pipeline.micro_batches):
        return whole
    try:
        other = find(LossPieces.ALL)
    except (InfeasibleError, SolverError):
        return whole
    return other if other.step_seconds < whole.step_seconds else whole


def has_pieces(plan: Plan) -> bool:
    """Whether a plan is of a graph with losses in pieces."""
    return any(layer.op == str(LINEAR_LOSS) for layer in plan.layers)


def as_known(traced: Traced, known: Sequence[Plan]) -> Traced:
    """The graph with its losses in pieces, if plans of other calls of the model have them so."""
    return (
        replace(traced, graph=with_losses_in_pieces(traced.graph)) if any(map(has_pieces, known)) else traced
    )
