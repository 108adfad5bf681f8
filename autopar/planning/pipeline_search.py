"""How many stages and micro-batches: compared by estimates, then planned.

    screen      for some K a few meshes, on the graph of M0 micro-batches       -> t, E, bytes
    estimate    for every K and M, from t, E and bytes                          -> an order
    plan        the first few in that order, each on its own graph              -> the best

Tracing a model and solving a mesh take seconds, and there are hundreds of choices (screening.py). So the
choice of K and M rests on estimates; the plan says so. The simplest that fits is planned whatever its
estimate is, if no other of as few stages is.

A step without stages is planned before those that must beat it. Where it is proved early that stages beat it
if they keep what they promise, it waits until they are planned: most of its integer programs are then spared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cluster import ClusterSpec
from autopar.core.deadline import after, is_over, left
from autopar.core.graph import Graph
from autopar.cost.machine.measuring import Budget
from autopar.errors import AutoparError, InfeasibleError, InputError, OverCapError, SolverError, TraceError
from autopar.planning.apart import Apart, complexity
from autopar.planning.asked.ask import NO_MEANS, SearchMeans
from autopar.planning.asked.request import Request
from autopar.planning.estimates import PipelineEstimate
from autopar.planning.first_plans import WholeBatch
from autopar.planning.screening import GraphOf, Screen
from autopar.planning.search import MeshDecision, decide, decide_first
from autopar.results.plan.plan import Alternative
from autopar.solve.program.solution import CutoffError

PLANNED = 3  # pairs of K and M that are planned
PER_RANKS = 2  # of them with one K
# So many times as fast as its estimate a plan may turn out where operators are measured: estimates rest on
# some that are and on some that aren't. Of the benchmark of hosts one without stages took 472 ms, not 645.
MEASURED = 1.5
SLOWER = 1.5  # times its estimate that a plan with stages may come out; one without is about as fast
SCREENED = 0.4  # of the time limit, at most, in which choices are compared


@dataclass(frozen=True, slots=True)
class BatchGraphs:
    """Graphs of a global batch of `size` samples: `graph_of(m)` is that of one of m micro-batches, and called
    once for each m that is looked at, of `least` or more. Only a batch that is computed at once, by one
    stage, has `outputs` bytes beside its loss; `at_once` is its graph with them, if it is planned with them.
    """

    graph_of: GraphOf
    size: int
    outputs: int = 0
    least: int = 1
    at_once: Graph | None = None


def decide_all(
    batch: BatchGraphs,
    cluster: ClusterSpec,
    request: Request,
    means: SearchMeans = NO_MEANS,
    *,
    ranks: int | None = None,
    micro_batches: int | None = None,
    first: MeshDecision | None = None,
) -> MeshDecision:
    """Find the best step for a global batch over numbers of pipeline ranks.

    `ranks`, `micro_batches` and `request.schedule` are chosen where they are None. The request's own numbers
    of both don't count. `first` stands if time is over.
    Raises InputError if nothing that is asked for can be run, InfeasibleError, with the least memory that
    would do, if no plan was found that meets the cap, SolverError if none was found in time.
    """
    graph_of, at_once = _once(batch.graph_of), batch.at_once
    deadline = after(request.time_limit) if means.deadline is None else means.deadline
    budget = means.budget or Budget(request.measure_seconds)
    means = replace(means, budget=budget, deadline=deadline)
    divisors = [each for each in _divisors(batch.size) if each >= batch.least]
    counts = [micro_batches] if micro_batches else divisors
    screening = None if deadline is None else after(SCREENED * max(0.0, left(deadline)))
    screen = Screen(graph_of, counts, batch.size, cluster, request, means.database, screening, batch.outputs)
    choices = screen.choices(ranks) if first is None else screen.choices_in_time(ranks)
    apart = screen.apart
    room = MEASURED if apart.measured else 1.0
    first = first or _first(screen, ranks, at_once)
    found = [first] if first else []
    failures: list[AutoparError] = []
    looked_at: list[PipelineEstimate] = []
    left_out: list[PipelineEstimate] = []
    waiting: dict[PipelineEstimate, float] = {}  # with seconds that they take at least
    while choice := _next(choices, [*looked_at, *waiting], apart, screen.cap) or next(iter(waiting), None):
        looked_at.append(choice)
        fastest = min((apart.limit(choice, each) for each in found), default=math.inf)
        waited = waiting.pop(choice, 0.0)
        if waited >= fastest:
            continue
        promised = math.inf if found or waited else apart.promised(choice, choices, screen.cap)
        is_fewest = choice is _simplest(_few(choices, apart, screen.cap), screen.cap)
        is_fewest = is_fewest and all(each.request.pipeline_ranks > choice.ranks for each in found)
        if not is_fewest and choice.seconds >= room * fastest:
            left_out.append(choice)  # plans are hardly faster than their estimates
            continue
        if found and is_over(deadline):
            break
        is_plain = choice.ranks == choice.micro_batches == 1
        try:
            graph = at_once if at_once and is_plain else graph_of(choice.micro_batches)
        except (InputError, TraceError) as error:
            failures.append(error)
            choices = [each for each in choices if each.micro_batches != choice.micro_batches]
            continue
        asked = replace(request, pipeline_ranks=choice.ranks, micro_batches=choice.micro_batches)
        if asked.mesh is None:
            asked = replace(asked, mesh=choice.mesh)
        try:
            found.append(decide(graph, cluster, asked, means, cutoff=min(fastest, promised)))
        except CutoffError as error:
            failures.append(error)
            if promised < fastest:
                waiting[looked_at.pop()] = promised
        except (InfeasibleError, InputError, SolverError, TraceError) as error:
            failures.append(error)  # InputError: so few samples that a pin can't be had
    if not found:
        raise _least(failures, len(looked_at))
    best = apart.simplest(found)
    if best is first:
        best = _searched(best, cluster, means)
    told = f"stages and micro-batches are the best of {len(choices)} choices by estimates"
    note = (told,) if len(choices) > 1 else ()
    notes = *note, *screen.notes, *screen.left_out.get(best.request.pipeline_ranks, ())
    whole = WholeBatch(graph_of, counts) if request.mesh is None else None
    return replace(
        best,
        notes=notes,
        passed=_passed(apart, best, found, left_out, screen.cap),
        batch=whole,
        scope=_scope(best) if note else "",
    )


def _scope(decision: MeshDecision) -> str:
    """The plans that a decision's bound speaks of, in words."""
    ranks, count = decision.request.pipeline_ranks, decision.request.micro_batches
    stages = f"of {ranks} pipeline ranks" if ranks > 1 else "without stages"
    batches = "the whole batch at once" if count == 1 else f"{count} micro-batches"
    return f"on mesh {decision.request.mesh or decision.problem.mesh}, {stages}, with {batches},"


def _passed(
    apart: Apart,
    best: MeshDecision,
    found: Sequence[MeshDecision],
    left_out: Sequence[PipelineEstimate],
    cap: float,
) -> tuple[Alternative, ...]:
    """Rows of what promises less than the best: of other decisions, else of what wasn't planned."""
    faster = [each for each in found if each.step.seconds < best.step.seconds]
    return tuple([apart.passed(each, best) for each in faster] or apart.left_out(left_out, best, cap))


def _first(screen: Screen, ranks: int | None, at_once: Graph | None) -> MeshDecision | None:
    """The plan that people run of a batch in the fewest parts; None without a cap, or if none meets it."""
    if ranks not in (None, 1) or screen.cap == math.inf:
        return None
    count = screen.counts[0]
    request = replace(screen.request, pipeline_ranks=1, micro_batches=count)
    return decide_first(at_once or screen.graph_of(count), screen.cluster, request, database=screen.database)


def _searched(first: MeshDecision, cluster: ClusterSpec, means: SearchMeans) -> MeshDecision:
    """A first plan, or a better one of its mesh, without stages and micro-batches, with its bound."""
    if is_over(means.deadline):
        return first
    try:
        return decide(first.problem.graph, cluster, replace(first.request, mesh=first.problem.mesh), means)
    except SolverError:
        return first


def _once(graph_of: GraphOf) -> GraphOf:
    """Calls it once for each count, whose error is repeated as well."""
    known: dict[int, Graph | InputError | TraceError] = {}

    def graph(count: int) -> Graph:
        if count not in known:
            try:
                known[count] = graph_of(count)
            except (InputError, TraceError) as error:
                known[count] = error
        found = known[count]
        if isinstance(found, Graph):
            return found
        raise found

    return graph


def _next(
    choices: Sequence[PipelineEstimate], known: Sequence[PipelineEstimate], apart: Apart, cap: float
) -> PipelineEstimate | None:
    """The next choice to look at beside those that are `known`, if any is left."""
    few = _few(choices, apart, cap) if choices else []
    return next((each for each in few if each not in known), None)


def _simplest(few: Sequence[PipelineEstimate], cap: float) -> PipelineEstimate | None:
    return min((each for each in few if each.nbytes <= cap), key=complexity, default=None)


def _least(failures: Sequence[AutoparError], count: int) -> AutoparError:
    """The error of the choice with which least memory is known to do, among so many."""
    error = min(failures, key=_would_do)
    if not isinstance(error, InfeasibleError) or count == 1:
        return error

    def tell() -> InfeasibleError:
        if error.least is None:
            return error
        return InfeasibleError(
            where=f"{error.where}, the leanest of {count} choices of stages and micro-batches",
            found=error.found,
            wanted=error.wanted,
            remedy=error.remedy,
            least=error.least,
        )

    return OverCapError(tell, known=error.would_do)


def _would_do(error: AutoparError) -> tuple[bool, float]:
    infeasible = isinstance(error, InfeasibleError)
    return not infeasible, error.would_do if isinstance(error, InfeasibleError) else math.inf


def _few(choices: Sequence[PipelineEstimate], apart: Apart, cap: float) -> list[PipelineEstimate]:
    """Chooses what to look at: the first ones, the first without stages, and the simplest of those that can't
    be told from the first. Not too many of the first have one K."""
    taken: list[PipelineEstimate] = []
    for choice in choices:
        alike = [each for each in taken if each.ranks == choice.ranks]
        if len(taken) < PLANNED and len(alike) < PER_RANKS or choice.ranks == 1 and not alike:
            taken.append(choice)
    fitting = [each for each in choices if each.nbytes <= cap]
    alike = [each for each in fitting if each.seconds <= apart.limit(each, fitting[0])]
    simplest = min(alike, key=complexity, default=taken[0])
    # What stages must beat is planned first, unless they promise so much that it decides nothing. With stages
    # the fastest is planned first: mostly the simplest then promises too little beside its plan.
    first = [each for each in fitting if each.ranks == 1 and each.seconds <= SLOWER * fitting[0].seconds][:1]
    return list(dict.fromkeys([*first, taken[0], simplest, *taken]))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
