"""From a traced graph and a cluster to the best plan over all meshes.

For every mesh that fits the links: cut the dims, price the strategies, solve, and with pipeline stages
cut the answer into them (mesh_search.py). The graph is that of one micro-batch. There is a
plan by estimates at once; on a machine that can measure, the calls that the winner and its runners-up use are
measured, what decides between them first, and the program is solved again, until the winner uses nothing that
is not measured, the rounds are over, or the budget is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import ClusterSpec
from autopar.core.deadline import after, is_over, left, note_step, say, watched
from autopar.core.force import PURE, Parallelism
from autopar.core.graph import Call, Graph
from autopar.core.mesh import Mesh
from autopar.cost.machine.measuring import Budget, CoRunners, Progress
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.errors import InfeasibleError, InputError, SolverError
from autopar.planning.apart import MEASURED, SURE, margin, measured_share, noise, promise
from autopar.planning.asked.ask import NO_MEANS, Limits, SearchMeans
from autopar.planning.asked.request import Request
from autopar.planning.first_plans import WholeBatch, first_of, first_on_one_axis
from autopar.planning.group_orders import unlike_blocks
from autopar.planning.measured_first import PlanCalls, most_valuable
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.meshes import meshes_of
from autopar.planning.refusals import stageable
from autopar.planning.report import report
from autopar.planning.shares import by_speed
from autopar.planning.strategies_beside import one_device, strategies_beside, within_the_cap
from autopar.planning.whole_step import SECONDS_TOLERANCE, proved
from autopar.results.plan.plan import Alternative, Plan
from autopar.sharding.atoms import Atoms, Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.program.solution import CutoffError, Solution
from autopar.solve.stages.step import Step, gathering_together
from autopar.units import show_bytes, show_seconds
from costdb.database import Database

MEASURING_ROUNDS = 6
LITTLE = 5e-3  # of a step: no other mesh of a long graph is solved to the end for less
ALONE = "that gathers weights one by one"  # as all do that are searched; groups are made of the best
RUNNERS_UP = 2  # pure strategies whose operators are measured beside the winner's


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan with what rewriting needs beside it."""

    plan: Plan
    dims: Dims
    prices: Prices
    solution: Solution
    step: Step


@dataclass(frozen=True, slots=True)
class MeshDecision:
    """The best step of the best mesh, before it is set beside others."""

    problem: MeshProblem
    step: Step
    cluster: ClusterSpec
    request: Request
    deadline: float | None
    others: float = math.inf  # seconds that no step on another mesh takes less than
    notes: tuple[str, ...] = ()
    batch: WholeBatch | None = None  # where its number of parts is the search's own
    passed: tuple[Alternative, ...] = ()  # more complicated plans that promise hardly less
    scope: str = ""  # of which plans the bound speaks, if not of all

    @property
    def unhindered(self) -> bool:
        """Whether memory slowed nothing: the fastest assignment fits as it is, or by copies that hide."""
        problem, cap = self.problem, self.problem.cap
        fastest = problem.solve(problem.ask(self.request.force), Limits(self.deadline))
        fits = cap is None or fastest.peak.nbytes <= cap
        return fits or self.step.solution.seconds <= fastest.seconds * (1 + SECONDS_TOLERANCE)


def search(graph: Graph, cluster: ClusterSpec, request: Request, means: SearchMeans = NO_MEANS) -> FoundPlan:
    """The best plan over all meshes of `cluster`, with its report; see `decide`."""
    return finish(decide(graph, cluster, request, means))


def decide(
    graph: Graph,
    cluster: ClusterSpec,
    request: Request,
    means: SearchMeans = NO_MEANS,
    *,
    cutoff: float = math.inf,
) -> MeshDecision:
    """The best step over all meshes of `cluster`; raises InfeasibleError or SolverError if there is none, or
    if it is proved early that none takes less than `cutoff` seconds, InputError for stages or micro-batches
    that can't be run. It is the best that is found by the deadline.

    `graph` is that of one of `request.micro_batches` micro-batches.

    The pure strategies that come closest are measured like the winner, so that it isn't chosen for
    an estimate of theirs. Measuring ends with the budget, or at the deadline.
    """
    _check_operators(graph)
    if request.meshes:
        raise InputError(
            where="--mesh " + "+".join(map(str, request.meshes)),
            found="stages with meshes of their own, to be searched",
            wanted="them in plan, run, verify and parallelize alone, which take them as they are",
            remedy="give all stages one mesh, or leave out --mesh",
        )
    stageable(graph, request)
    budget = means.budget or Budget(request.measure_seconds)
    model = CostModel.of(cluster, means.database).corrected(budget)
    whole, cluster = cluster, cluster.stage(request.pipeline_ranks)
    meshes = meshes_of(cluster, request)
    _check_mesh(meshes, cluster)
    meshes = unlike(meshes, cluster, find_atoms(graph), request)
    meshes = by_speed(meshes, graph, cluster, model, request)
    hop = model.hop(whole, request.pipeline_ranks)
    cap, blocks = request.cap(cluster), unlike_blocks(whole, request)
    deadline = after(request.time_limit) if means.deadline is None else means.deadline

    def solved() -> _Best:
        problems = [MeshProblem(graph, mesh, cluster, model, request, cap, hop, blocks) for mesh in meshes]
        return _best(problems, deadline, cutoff)

    try:
        best = solved()
    except InfeasibleError as error:
        if cluster.groups:
            error.add_remedy(_least_of_groups(cluster))
        raise
    for number in range(MEASURING_ROUNDS if request.measure and model.here else 0):
        if is_over(deadline):
            break
        if means.progress:
            means.progress(0, 0, f"the best plan so far takes {show_seconds(best.step.seconds)} a step")
        budget.limit(left(deadline))
        known, wanted = model, _wanted(best, deadline, runners_up=number == 0)
        model = model.measure(wanted, means.database, means.progress, means.co_runners, budget)
        if model is known:
            break
        best = solved()
    return MeshDecision(best.problem, best.step, whole, request, deadline, best.others)


def decide_first(
    graph: Graph,
    cluster: ClusterSpec,
    request: Request,
    *,
    database: Database | None = None,
    deadline: float | None = None,
) -> MeshDecision | None:
    """A plan that people run, without stages, on one axis: made in seconds, however little time is left. None
    if none meets the cap."""
    made = first_on_one_axis(graph, cluster, request, CostModel.of(cluster, database))
    return MeshDecision(*made, cluster, request, deadline, 0.0) if made else None


def finish(decision: MeshDecision) -> FoundPlan:
    """The report of a decision, its cut refined, beside the pure strategies; one of these that is faster
    replaces it. It is made however little time is left."""
    with watched(None):
        return _finished(decision)


def _finished(decision: MeshDecision) -> FoundPlan:
    problem, request = decision.problem, decision.request
    step = problem.refined(decision.step, decision.deadline, decision.others)
    asked = request.alternatives and not request.force and not is_over(decision.deadline)
    limits = Limits(decision.deadline, incumbent=step)
    alternatives = strategies_beside(problem, limits) if asked else []
    # A pure strategy keeps to no pins: where layers are pinned it may only stand beside the plan.
    mixed = step
    if not request.pins:
        problem, step = _prefer_simpler((problem, step), alternatives)
    rows = [_with_pins(item, step) if request.pins else item for item, _ in alternatives]
    if decision.batch is not None and problem.cap is not None:
        rows = [within_the_cap(row, problem, decision.batch, decision.cluster, step, limits) for row in rows]
    if step.seconds > mixed.seconds:
        rows.append(promise("mixed", mixed.seconds, mixed.peak_bytes, step.seconds))
    if (unlike := mixed.passed) and step.seconds > unlike.seconds:
        rows.append(promise("unlike blocks", unlike.seconds, unlike.peak_bytes, step.seconds))
    step = gathering_together(step, problem.cap, request.micro_batches, problem.hop)
    plan = report(step, decision.cluster, rows, problem.cap, request)
    serial = one_device(problem, decision.cluster, decision.deadline) if asked else None
    plan = dataclasses.replace(beside(plan, decision), serial=serial)
    return FoundPlan(plan, problem.dims, problem.prices, step.solution, step)


def beside(plan: Plan, decision: MeshDecision) -> Plan:
    """The plan with what is known of others beside it."""
    return dataclasses.replace(
        plan,
        scope=" ".join(filter(None, (decision.scope, ALONE if plan.program.together else ""))),
        notes=(*plan.notes, *decision.notes),
        alternatives=(*plan.alternatives, *(decision.passed if decision.request.alternatives else ())),
    )


def measure_operators(
    graph: Graph,
    cluster: ClusterSpec,
    request: Request,
    *,
    database: Database,
    progress: Progress | None = None,
    co_runners: CoRunners | None = None,
) -> int:
    """Measure the calls of the plan that estimates find best, and of every pure strategy, on every mesh.

    So that a later search compares what is measured with what is measured. Returns how many calls the
    database then knows.
    """
    meshes = meshes_of(cluster, request)
    _check_mesh(meshes, cluster)
    model = CostModel.of(cluster, database)
    deadline = after(request.time_limit)
    candidates = []
    for mesh in meshes:
        problem = MeshProblem(graph, mesh, cluster, model, request, None, cluster.intra)
        for force in (None, *PURE):
            with contextlib.suppress(InfeasibleError):
                solution = problem.solve(problem.ask(force, bounded=False), Limits(deadline))
                candidates.append(PlanCalls.of(solution.priced))
    model = model.measure(most_valuable(candidates, model), database, progress, co_runners)
    return len({key for each in candidates for key in each.calls} & model.measured.keys())


def _check_operators(graph: Graph) -> None:
    """Raise InputError for a graph without operators: there is nothing to place."""
    if not graph.operators:
        raise InputError(
            where="the model's forward",
            found="no operators: it gives back what it takes or holds",
            wanted="a model that computes something",
            remedy="call it as it is, without autopar; a model that contains it can be planned",
        )


def unlike(meshes: list[Mesh], cluster: ClusterSpec, atoms: Atoms, request: Request) -> list[Mesh]:
    """Leave out meshes that cost the same as another whose axes come in another order: 2x4 stays, not 4x2.

    Within a node all links are alike; what axes cut evenly they cut alike in any order.
    """
    if (
        cluster.nodes > 1
        or cluster.groups
        or atoms.scalings
        or request.pins
        or isinstance(request.force, tuple)
    ):
        return meshes
    lengths = {length for dims in atoms.of.values() for parts in dims for length in parts}
    found: dict[object, Mesh] = {}
    for mesh in meshes:
        subsets = (
            math.prod(sizes)
            for count in range(2, len(mesh.shape) + 1)
            for sizes in itertools.combinations(mesh.shape, count)
        )
        even = all(length % size == 0 for size in set(subsets) for length in lengths if size <= length)
        found.setdefault(tuple(sorted(mesh.shape)) if even else mesh, mesh)
    return list(found.values())


def _least_of_groups(cluster: ClusterSpec) -> str:
    """A remedy for unlike devices, of which the one with least memory sets the cap."""
    known = [group for group in cluster.groups if group.memory is not None]
    if not known:
        return "leave out the group with least memory"
    least = min(known, key=lambda group: group.memory or 0)
    return f"plan without group {least.name}, whose {show_bytes(least.memory or 0)} a device are the least"


def _check_mesh(meshes: Sequence[Mesh], cluster: ClusterSpec) -> None:
    for mesh in meshes:
        if mesh.num_devices != cluster.num_devices:
            raise InputError(
                where="--mesh",
                found=f"{mesh}, {mesh.num_devices} devices",
                wanted=f"a mesh of the cluster's {cluster.num_devices} devices",
                remedy="choose from " + ", ".join(map(str, cluster.meshes())),
            )


@dataclass(frozen=True, slots=True)
class _Best:
    """The best step, its mesh, and `others`: seconds that no step on another mesh takes less than."""

    problem: MeshProblem
    step: Step
    others: float


def _best(problems: Sequence[MeshProblem], deadline: float | None, cutoff: float) -> _Best:
    """The best step of all meshes; those on which nothing faster than what is found can be are left, and in
    long graphs those on which nothing much faster can be."""
    scarce = deadline is not None or problems[0].cap is not None
    found = _first(problems) if scarce and cutoff == math.inf else []
    failures: list[InfeasibleError | SolverError] = []
    bounds = dict[Mesh, float]()  # seconds that no step on a mesh takes less than
    for problem in problems:
        spared = 1 - LITTLE if problem.is_long else 1.0
        limits = Limits(deadline, min([cutoff, *(spared * step.seconds for _, step in found)]))
        if found and is_over(deadline):
            failures.append(_too_late(problem))
            continue
        try:
            say(_doing(problem))
            ask = problem.ask(problem.request.force, cap=problem.cap)
            found.append((problem, step := problem.plan(ask, limits)))
            bounds[problem.mesh] = step.bound
            note_step(step.seconds)
        except (InfeasibleError, SolverError) as error:
            failures.append(error)
            if isinstance(error, CutoffError):
                bounds[problem.mesh] = proved(error, limits.cutoff, problem.request.micro_batches)
    if any(isinstance(error, SolverError) for error in failures):
        found = found or _first(problems)
    if not found:
        raise _worst(failures)
    problem, step = min(found, key=lambda pair: pair[1].seconds)
    others = [bound for mesh, bound in bounds.items() if mesh != problem.mesh]
    if any(isinstance(error, SolverError) for error in failures):
        others.append(0.0)  # a mesh not solved in time leaves the gap open
    least = min(others, default=math.inf)
    bound = min(step.seconds, bounds.get(problem.mesh, 0.0), least)
    return _Best(problem, dataclasses.replace(step, bound=max(0.0, bound)), least)


def _doing(problem: MeshProblem) -> str:
    """What is searched now."""
    request = problem.request
    stages = f"{request.pipeline_ranks} pipeline ranks, " if request.pipeline_ranks > 1 else ""
    return f"mesh {problem.mesh}, {stages}{request.micro_batches} micro-batches"


def _first(problems: Sequence[MeshProblem]) -> list[tuple[MeshProblem, Step]]:
    """A plan that people run, if one without stages is allowed: the one that is to be beaten."""
    problem = min(problems, key=lambda each: len(each.mesh.shape))
    step = first_of(problem)
    if step is None:
        return []
    problem.first = step.solution
    note_step(step.seconds)
    return [(problem, step)]


def _too_late(problem: MeshProblem) -> SolverError:
    return SolverError(
        where=f"mesh {problem.mesh}",
        found="no plan in time",
        wanted="an incumbent",
        remedy="give more with --time-limit",
    )


def _worst(failures: Sequence[InfeasibleError | SolverError]) -> InfeasibleError | SolverError:
    """The error that stands for all meshes' failures. It isn't infeasible while one mesh was not solved in
    time or left out by its bound; else it is that of the mesh on which least memory is known to do."""
    open_ends = [error for error in failures if isinstance(error, SolverError | CutoffError)]
    if open_ends:
        return min(open_ends, key=lambda error: isinstance(error, CutoffError))
    infeasible = [error for error in failures if isinstance(error, InfeasibleError)]
    return min(infeasible, key=lambda error: error.would_do)


def _wanted(best: _Best, deadline: float | None, *, runners_up: bool) -> list[Call]:
    """The calls to be measured for the best step, those that decide first. With `runners_up`, or if it has
    none left, also those of the pure strategies that come closest, unless a strategy is forced."""
    problem = best.problem
    own = PlanCalls.of(best.step.solution.priced)
    if problem.request.force or not (runners_up or not problem.model.missing(own.calls.values())):
        return most_valuable([own], problem.model)
    steps = [step for _, step in strategies_beside(problem, Limits(deadline)) if step]
    nearest = sorted(steps, key=lambda each: each.seconds)[:RUNNERS_UP]
    others = [PlanCalls.of(each.solution.priced) for each in nearest]
    return most_valuable([own, *others], problem.model)


def _with_pins(row: Alternative, step: Step) -> Alternative:
    """A pure strategy that is faster than a plan with pins, and why it isn't taken."""
    faster = row.feasible and row.step_seconds is not None and row.step_seconds < step.seconds
    return dataclasses.replace(row, reason="keeps to no pins") if faster else row


def _prefer_simpler(
    best: tuple[MeshProblem, Step], alternatives: Sequence[tuple[Alternative, Step | None]]
) -> tuple[MeshProblem, Step]:
    """Never a plan that is predicted slower than a pure strategy: an incumbent in time may be. Between
    plans that can't be told apart the pure strategy wins, which has less that could go wrong."""
    problem, step = best
    pure = [(row, item) for row, item in alternatives if item and row.feasible]
    alike = [item for row, item in pure if item.seconds <= _limit(best, item, row.name)]
    if not alike:
        return best
    winner = min(alike, key=lambda item: item.seconds)
    solution = dataclasses.replace(winner.solution, status=step.solution.status)
    return problem, dataclasses.replace(winner, bound=min(step.bound, winner.seconds), solution=solution)


def _limit(best: tuple[MeshProblem, Step], pure: Step, kind: str) -> float:
    """The seconds up to which a pure strategy stands: by estimates only data parallelism is simpler than a
    mixed plan, for an expert mixes the kinds of model parallelism."""
    _, step = best
    priced = step.solution.priced
    if kind == Parallelism.BATCH.value:
        return step.seconds * (1 + margin(priced, pure.solution.priced))
    apart = max(measured_share(priced) * MEASURED, SURE * noise(priced, pure.solution.priced))
    return step.seconds * (1 + apart)
