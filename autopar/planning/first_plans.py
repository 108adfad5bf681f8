"""The plans that people run, each made in seconds before anything is searched.

Of each kind the fastest assignment; under a cap the fastest of those that keep state in shards, as bytes have
a price, with as much computed again as the cap asks:

    batch      data parallel, ZeRO or FSDP
    filter     Megatron's column split, channel its row split
    domain     spatial or sequence parallel

They are the incumbent that a search must beat, and rows beside the plan: each as good as its kind can be made
within the cap, over all devices, of the whole batch at once or in as few parts as fit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import ClusterSpec
from autopar.core.deadline import is_over, say, watched
from autopar.core.force import PURE, Force
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.recompute import Recompute
from autopar.cost.machine.model import CostModel
from autopar.errors import InfeasibleError, SolverError
from autopar.planning.asked.ask import UNLIMITED, Ask, Limits
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.meshes import meshes_of
from autopar.planning.shares import by_speed
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.program.solution import Solution, completed
from autopar.solve.stages.step import Step, unstaged
from autopar.solve.stages.user_checkpoints import respect

BYTE_PRICES = (0.1, 1.0, 10.0)  # of all bytes of the fastest assignment, in its own seconds


def first_on_one_axis(
    graph: Graph, cluster: ClusterSpec, request: Request, model: CostModel
) -> tuple[MeshProblem, Step] | None:
    """The first plan of a graph on a mesh of as few axes as may be, and its problem; see `first_of`."""
    mesh = min(meshes_of(cluster, request), key=lambda each: len(each.shape))
    mesh = by_speed([mesh], graph, cluster, model, request)[0]
    hop, cap = model.hop(cluster, 1), request.cap(cluster)
    problem = MeshProblem(graph, mesh, cluster, model, request, cap, hop)
    step = first_of(problem)
    return (problem, step) if step else None


def first_of(problem: MeshProblem) -> Step | None:
    """The first plan of what is asked for, if that allows one without stages; None if none meets the cap.

    It is made however little time is left.
    """
    request = problem.request
    if request.pipeline_ranks > 1 or request.pins:
        return None
    say(f"data parallel and other pure kinds on mesh {problem.mesh}")
    with watched(None):
        return first_plan(problem, PURE if request.force is None else (request.force,), UNLIMITED)


def first_plan(problem: MeshProblem, kinds: Sequence[Force], limits: Limits) -> Step | None:
    """The fastest step of pure kinds, without stages, that meets the cap; None if none does in time."""
    best: Step | None = None
    for kind in kinds:
        with contextlib.suppress(InfeasibleError, SolverError):
            step = first_step(problem, kind, limits, cutoff=best.seconds if best else math.inf)
            fits = problem.cap is None or step.peak_bytes <= problem.cap
            best = step if fits and (best is None or step.seconds < best.seconds) else best
        if best is not None and is_over(limits.deadline):
            break
    return best


def first_step(
    problem: MeshProblem, kind: Force, limits: Limits = UNLIMITED, *, cutoff: float = math.inf
) -> Step:
    """The step of one kind, without stages: the fastest that meets the cap, else the leanest; the fastest of
    all if that takes `cutoff` seconds.

    Raises InfeasibleError if the kind can't be had, SolverError if there is no step in time.
    """
    ask = problem.ask(kind, bounded=False)
    step = _step(problem, fastest := problem.solve(ask, limits))
    if problem.cap is None or step.peak_bytes <= problem.cap or step.seconds >= cutoff:
        return step
    steps = [_step(problem, each) for each in _lean(problem, ask, fastest, limits)]
    return min(steps, key=lambda each: (max(each.peak_bytes, problem.cap or 0), each.seconds))


def _step(problem: MeshProblem, solution: Solution) -> Step:
    """The step of an assignment, with the model's own checkpoints, and no bound: others have other kinds."""
    count = problem.request.micro_batches
    step = unstaged(replace(solution, bound=-math.inf, status="gap_limit"), count)
    if problem.request.training and problem.request.recompute is Recompute.AUTO:
        step = respect(step, micro_batches=count, hop=problem.hop, cap=problem.cap)
    return step


def _lean(problem: MeshProblem, ask: Ask, fastest: Solution, limits: Limits) -> Iterator[Solution]:
    """Assignments at rising prices of a byte, fitted to the cap, until one meets it."""
    cap, found = problem.cap or 0, math.inf
    for share in BYTE_PRICES:
        if found <= cap or found < math.inf and is_over(limits.deadline):
            break
        price = share * fastest.seconds / fastest.peak.nbytes
        lean = problem.solve(replace(ask, memory_price=MemoryPrice(price, price)), limits)
        fitted = completed(lean.priced, cap, recompute=ask.recompute, offload=problem.offload)
        found = fitted.peak.nbytes
        yield fitted


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A global batch: the graph of one of so many parts that follow each other, and the numbers of parts."""

    graph_of: Callable[[int], Graph]
    counts: Sequence[int]

    def few(self, step: Step, cap: int) -> int | None:
        """About the fewest parts of which one would fit, if a step saves as much as this one."""
        room = cap - step.state_bytes
        enough = [
            count for count in self.counts if room > 0 and count * room >= step.peak_bytes - step.state_bytes
        ]
        return min(enough, default=None)


def fitted_step(
    problem: MeshProblem,
    batch: WholeBatch,
    kind: Force,
    cluster: ClusterSpec,
    limits: Limits,
    *,
    cutoff: float = math.inf,
) -> tuple[MeshProblem, Step]:
    """The step of one kind on all devices, in as few parts of the batch as fit, and its problem.

    All devices of the cluster are on one axis. What takes `cutoff` seconds or more isn't made to fit. See
    `first_step` for what it raises."""
    at_once = _in_parts(problem, batch, batch.counts[0], cluster)
    step, cap = first_step(at_once, kind, limits, cutoff=cutoff), problem.cap or 0
    count = batch.few(step, cap)
    done = step.peak_bytes <= cap or step.seconds >= cutoff or is_over(limits.deadline)
    if done or count is None or count == batch.counts[0]:
        return at_once, step
    parted = _in_parts(problem, batch, count, cluster)
    return parted, first_step(parted, kind, limits, cutoff=cutoff)


def _in_parts(problem: MeshProblem, batch: WholeBatch, count: int, cluster: ClusterSpec) -> MeshProblem:
    """The problem of all devices on one axis, of the batch in so many parts; of the same graph, with the same
    outputs, where it has as many."""
    asked = problem.request
    is_same = asked.pipeline_ranks == 1 and asked.micro_batches == count
    graph = problem.graph if is_same else batch.graph_of(count)
    request = replace(asked, pipeline_ranks=1, micro_batches=count, mesh=None)
    mesh, hop = Mesh((cluster.num_devices,)), problem.model.hop(cluster, 1)
    return MeshProblem(graph, mesh, cluster, problem.model, request, problem.cap, hop)
