"""The plan of stages whose meshes are asked for one by one: `--mesh 1+3`, or of one stage for each group.

    mesh 1      rank 0           each mesh's best assignment of the whole graph    -> a program, tables
    mesh 3      ranks 1 2 3      one cut, each stage priced by its own tables      -> starts

The value that crosses a cut leaves as it lies in one program and arrives as it lies in the next, by messages
from part to part. Under a cap leaner assignments are tried, at rising prices of a byte.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autopar.cluster import ClusterSpec, Link
from autopar.core.deadline import after
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.pipeline import inseparable
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind
from autopar.cost.interval_table import Row
from autopar.cost.machine.collectives import send_recv
from autopar.cost.machine.model import CostModel
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.values import Value
from autopar.cost.stages.intervals import (
    Intervals,
    choose_places,
    crossing_bytes,
    crossing_row,
    intervals,
)
from autopar.errors import InfeasibleError, InputError, SolverError, TraceError
from autopar.planning.asked.ask import NO_MEANS, Limits, SearchMeans
from autopar.planning.asked.option_values import with_axes
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.refusals import stageable
from autopar.planning.report import report
from autopar.planning.step_parts import scaled, staged_parts
from autopar.results.plan.plan import Plan
from autopar.results.plan.step_parts import StepParts
from autopar.rewrite.stage_borders import MeshSide, messages, transposed
from autopar.schedules.fill_bubbles import order_of
from autopar.schedules.in_flight import scheduled
from autopar.schedules.simulate import simulate
from autopar.solve.choices.memory_price import MemoryPrice
from autopar.solve.program.solution import Solution
from autopar.solve.stages.cut_search import MOST_CUT_PLACES, ScheduledCut, best, cuts
from autopar.solve.stages.step import share_of, step_of

KINDS = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)  # one stage a rank: whose messages are sent here
MOST_STAGED_GROUPS = 4  # of unlike sizes, each of which may be one stage
BYTE_PRICES = (0.0, 1 / 16, 1 / 4, 1.0, 4.0)  # of a step's seconds, what all its bytes may cost
GAP = "the gap covers"
GAP_NOTE = f"{GAP} all cuts into stages on these meshes, of operators that are split as here"


@dataclass(frozen=True, slots=True)
class StageProblem:
    """One pipeline rank's problem, of the whole graph on its mesh and part of the cluster."""

    problem: MeshProblem
    part: ClusterSpec

    def solve(self, price: float, limits: Limits) -> Solution:
        """The fastest assignment, at a price of its bytes."""
        ask = self.problem.ask(self.problem.request.force)
        fastest = self.problem.solve(ask, limits)
        if not price:
            return fastest
        seconds = price * fastest.seconds / max(1, fastest.peak.nbytes)
        return self.problem.solve(replace(ask, memory_price=MemoryPrice(seconds, seconds)), limits)


def find_unlike(graph: Graph, cluster: ClusterSpec, request: Request, means: SearchMeans = NO_MEANS) -> Plan:
    """The plan of stages on the request's meshes, one after the other; raises InputError for what such stages
    can't have, InfeasibleError if they don't fit."""
    _check(request)
    stageable(graph, request)
    limits = Limits(after(request.time_limit) if means.deadline is None else means.deadline)
    problems = _problems(graph, cluster, request, CostModel.of(cluster, means.database))
    hop = problems[0].problem.hop
    found: list[tuple[ScheduledCut, list[Solution]]] = []
    failures: list[InfeasibleError] = []
    for price in BYTE_PRICES:
        solutions = [each.solve(price, limits) for each in problems]
        try:
            found.append((_cut(problems, solutions, hop), solutions))
        except InfeasibleError as error:
            failures.append(error)
            continue
        break
    if not found:
        raise min(failures, key=lambda error: error.least or 0)
    return _told(found[0], problems, cluster)


def _check(request: Request) -> None:
    """Raise InputError for options that stages on unlike meshes don't have."""
    told = {
        "--recompute all": request.recompute is Recompute.ALL,
        "--compile": request.compile,
        "pins of layers": bool(request.pins),
        f"--schedule {request.schedule.value if request.schedule else ''}": request.schedule
        not in (None, *KINDS),
    }
    wrong = [name for name, is_asked in told.items() if is_asked]
    if wrong:
        raise InputError(
            where="--mesh " + "+".join(map(str, request.meshes)),
            found=" and ".join(wrong),
            wanted="stages on meshes of their own without these, under gpipe or 1f1b",
            remedy="leave them out, or give all stages one mesh",
        )


def _problems(graph: Graph, cluster: ClusterSpec, request: Request, model: CostModel) -> list[StageProblem]:
    hop = cluster.inter if cluster.nodes > 1 and cluster.inter else cluster.intra
    known: dict[tuple[Mesh, ClusterSpec], StageProblem] = {}
    found = []
    for mesh, part in zip(request.meshes, parts_of(cluster, request.meshes), strict=True):
        made = known.get((mesh, part)) or problem_on(graph, mesh, part, request, model, hop)
        found.append(known.setdefault((mesh, part), made))
    return found


def problem_on(
    graph: Graph, mesh: Mesh, part: ClusterSpec, request: Request, model: CostModel, hop: Link | None = None
) -> StageProblem:
    """The problem of a pipeline rank on a part of the cluster, by the costs of its own group."""
    numbers = {number for groups in part.places for number in groups}
    alone = next(iter(numbers)) if len(numbers) == 1 else None
    own = (part, model) if alone is None else (part.of_group(alone), model.of_group(alone))
    asked = replace(request, mesh=mesh, meshes=())
    return StageProblem(MeshProblem(graph, mesh, *own, asked, request.cap(part), hop or part.intra), part)


def parts_of(cluster: ClusterSpec, meshes: Sequence[Mesh]) -> list[ClusterSpec]:
    """The devices of each mesh, one after the other; raises InputError if they aren't those of the cluster,
    or lie on a part of several nodes."""
    sizes = [mesh.num_devices for mesh in meshes]
    firsts = [0, *itertools.accumulate(sizes)]
    node = cluster.devices_per_node
    split = [
        mesh
        for mesh, first, size in zip(meshes, firsts, sizes, strict=False)
        if first // node != (first + size - 1) // node and (first % node or size % node)
    ]
    fits = firsts[-1] == cluster.num_devices
    if not fits or split:
        raise InputError(
            where="--mesh " + "+".join(map(str, meshes)),
            found=f"{firsts[-1]} devices" + (f", {split[0]} across nodes" if fits else ""),
            wanted=f"the cluster's {cluster.num_devices}, each stage in a node or on whole ones",
            remedy="write meshes whose devices add up to the cluster's, as 1+3 for 4",
        )
    return [cluster.slice(first, size) for first, size in zip(firsts, sizes, strict=False)]


def _cut(problems: Sequence[StageProblem], solutions: Sequence[Solution], hop: Link) -> ScheduledCut:
    """The best cut, each stage by its own tables."""
    first, request = problems[0].problem, problems[0].problem.request
    schedules = [
        scheduled(kind, len(problems), 1, request.micro_batches) for kind in request.kinds() if kind in KINDS
    ]
    apart = inseparable(first.graph)
    chosen = choose_places(crossing_bytes(solutions[0].priced), MOST_CUT_PLACES)
    places = tuple(place for place in chosen if place not in apart)
    caps = [each.problem.cap for each in problems]
    least = min((cap for cap in caps if cap is not None), default=None)
    room = tuple(0 if cap is None or least is None else cap - least for cap in caps)
    return best(cuts([_joined(solutions, hop, places, room)], schedules, cap=least))


def _joined(
    solutions: Sequence[Solution], hop: Link, places: Sequence[int], room: tuple[int, ...]
) -> Intervals:
    """The tables of all ranks as one, with what crosses each border; bounds count the least of these."""
    tables = [intervals(each.priced, hop, places=places) for each in solutions]
    hops = tuple(
        _border(one.priced, other.priced, hop, places) for one, other in itertools.pairwise(solutions)
    )
    send, send_back = (np.minimum.reduce(rows) for rows in zip(*hops, strict=True))
    held = {
        name: np.maximum.reduce([getattr(each, name) for each in tables])
        for name in ("received", "received_back")
    }
    of_ranks = tuple(replace(each, send=send, send_back=send_back, **held) for each in tables)
    return replace(of_ranks[0], of_ranks=of_ranks, room=room, hops=hops)


def _border(before: PricedProgram, after: PricedProgram, hop: Link, places: Sequence[int]) -> tuple[Row, Row]:
    """Seconds of the values that cross each cut from one mesh to the next, and of their gradients back: of
    the rank that sends or receives most."""
    last: dict[str, int] = {}
    for each in before.values.of.values():
        last[each.name] = max([last.get(each.name, -1), *each.uses])
    sources = [before.values.source(name) for name in before.values.sources]
    crossing = [replace(each, uses=(last[each.name],)) for each in sources if last.get(each.name, -1) >= 0]

    def seconds(value: Value, *, back: bool) -> float:
        name, specs = value.name, before.graph.specs
        if value.free or (back and not specs[name].requires_grad):
            return 0.0
        sides = [MeshSide(each.prices.dims, each.values.source(name).layout) for each in (before, after)]
        if back:
            sides = [side._replace(layout=transposed(side.layout)) for side in reversed(sides)]
        sent, received = Counter[int](), Counter[int]()
        for item in messages(name, *sides):
            nbytes = math.prod(item.sent.shape) * specs[name].dtype.itemsize
            sent[item.sender] += nbytes
            received[item.receiver] += nbytes
        return send_recv(max([*sent.values(), *received.values()], default=0), hop)

    ahead, back = (crossing_row(crossing, places, partial(seconds, back=each)) for each in (False, True))
    return ahead, back


def _told(
    found: tuple[ScheduledCut, list[Solution]], problems: Sequence[StageProblem], cluster: ClusterSpec
) -> Plan:
    """One plan of what is told of each rank's stage."""
    (cut, schedule), solutions = found
    share = min(share_of(each, None) for each in solutions)
    steps = [step_of(each, cut, schedule, free=cut.seconds, share=share) for each in solutions]
    own = [
        report(step, cluster, (), each.problem.cap, each.problem.request)
        for step, each in zip(steps, problems, strict=True)
    ]
    stages = list(itertools.pairwise((*cut.starts, len(own[0].layers))))
    layers = tuple(
        layer for plan, (start, stop) in zip(own, stages, strict=True) for layer in plan.layers[start:stop]
    )
    fullest, pipeline = own[cut.fullest], own[0].pipeline
    compute = sum(layer.compute for layer in layers)
    count = pipeline.micro_batches
    repeated = scaled(StepParts(compute=compute), count / len(own))
    return replace(
        fullest,
        program=own[0].program,
        programs=tuple(plan.program for plan in own),
        pipeline=replace(pipeline, meshes=tuple(plan.mesh for plan in own)),
        layers=layers,
        conversions=tuple(dict.fromkeys(line for plan in own for line in plan.conversions)),
        compute_seconds=count * compute / len(own),
        parameter_bytes=tuple(_weights(own, problems)),
        gathered_ops=tuple(dict.fromkeys(line for plan in own for line in plan.gathered_ops)),
        notes=(*dict.fromkeys(note for plan in own for note in plan.notes if GAP not in note), GAP_NOTE),
        parts=staged_parts(repeated, simulate(order_of(pipeline), cut.stages), steps[0].seconds),
    )


def _weights(plans: Sequence[Plan], problems: Sequence[StageProblem]) -> Iterator[int]:
    for rank, (plan, each) in enumerate(zip(plans, problems, strict=True)):
        devices = each.problem.mesh.num_devices
        yield from plan.parameter_bytes[rank * devices : (rank + 1) * devices]


def find_by_groups(
    graph_of: Callable[[int], Graph],
    counts: Sequence[int],
    cluster: ClusterSpec,
    request: Request,
    means: SearchMeans,
) -> Plan | None:
    """The plan of one stage for each group of the cluster, on the mesh that is fastest there; None unless
    groups are of unlike sizes, or if none can be had. Of the numbers of micro-batches, `counts`, it takes the
    one nearest to four for each stage."""
    sizes = [group.num_devices for group in cluster.groups]
    own = tuple((number,) for number, size in enumerate(sizes) for _ in range(size))
    if not 2 <= len(sizes) <= MOST_STAGED_GROUPS or len({*sizes}) == 1 or cluster.places != own:
        return None
    count = min(counts, key=lambda each: (abs(math.log(each / (4 * len(sizes)))), each))
    asked = replace(request, pipeline_ranks=len(sizes), micro_batches=count)
    model, limits = CostModel.of(cluster, means.database), Limits(means.deadline)
    try:
        graph = graph_of(count)
        parts = parts_of(cluster, [Mesh((size,)) for size in sizes])
        chosen = [_fastest_mesh(graph, part, asked, model, limits) for part in parts]
        axes = max(len(mesh.shape) for mesh in chosen)
        meshes = tuple(with_axes(mesh, axes) for mesh in chosen)
        return find_unlike(graph, cluster, replace(asked, meshes=meshes), means)
    except (InfeasibleError, InputError, SolverError, TraceError):
        return None


def _fastest_mesh(
    graph: Graph, part: ClusterSpec, request: Request, model: CostModel, limits: Limits
) -> Mesh:
    """The mesh on which the whole graph is faster: one axis, or nodes by devices."""
    flat, nodes = Mesh((part.num_devices,)), Mesh((part.nodes, part.devices_per_node))
    meshes = [flat, nodes] if min(nodes.shape) > 1 else [flat]
    problems = [problem_on(graph, mesh, part, request, model) for mesh in meshes]
    return min(problems, key=lambda each: each.solve(0.0, limits).seconds).problem.mesh
