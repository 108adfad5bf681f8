"""From a traced graph and a cluster to the best plan over all meshes, with its report.

For every mesh that fits the links: cut the dims, price the strategies, solve. On a machine that can
measure, the calls that the winner uses are measured and the program is solved again, until it uses
nothing that is not measured or the rounds are over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import ClusterSpec
from autopar.convert.table import effect
from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline, stages_per_rank
from autopar.core.placement import Layout
from autopar.core.plan import Alternative, Layer, Plan, Program
from autopar.core.schedule import ScheduleKind
from autopar.cost.collectives import send_recv
from autopar.cost.model import Company, CostModel, Progress
from autopar.cost.prices import Prices
from autopar.errors import InfeasibleError, InputError, SolverError
from autopar.ilp.choose import Solution
from autopar.ilp.fold import Folding, fold
from autopar.ilp.recompute import segments
from autopar.ilp.space import (
    Force,
    Kinds,
    Parallelism,
    Pins,
    build_space,
    is_heavy,
    kind_by_axis,
    name_of,
)
from autopar.ilp.stages import cut
from autopar.ilp.symmetry import choose_named
from autopar.ops.analysis import find_atoms
from autopar.ops.dims import Atoms, Dims
from autopar.ops.equation import Option
from costdb.database import Database

MEASURING_ROUNDS = 6
RIVALS = 2  # pure strategies whose operators are measured beside the winner's
DEFAULT_GAP = 1e-3


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks of the search; every field has the command line's default.

    `memory` is bytes per device, `stored` fixes parameters that lie on the devices already. With
    `local_inputs` user inputs may be passed in parts, as `user_layouts` (by path) says where it can;
    with `local_outputs` all outputs but the loss may leave in parts.
    """

    mesh: Mesh | None = None
    force: Force | None = None
    pins: Pins | None = None
    memory: int | None = None
    time_limit: float | None = None
    gap: float = DEFAULT_GAP
    training: bool = True
    measure: bool = True
    alternatives: bool = True
    optimizer_states: int = 2
    stored: Mapping[str, Layout] | None = None
    local_inputs: bool = False
    local_outputs: bool = False
    user_layouts: Mapping[str, Layout] | None = None
    stages: int = 1  # pipeline ranks
    micro_batches: int = 1
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    recompute: bool = False  # all parts of the graph, in backward
    homes: Mapping[str, int] | None = None  # the first stage of each parameter, where they lie already

    @property
    def num_stages(self) -> int:
        return self.stages * stages_per_rank(self.schedule) if self.stages > 1 else 1


@dataclass(frozen=True, slots=True)
class Found:
    """A plan with what rewriting needs beside it."""

    plan: Plan
    dims: Dims
    prices: Prices
    solution: Solution


def search(
    graph: Graph,
    cluster: ClusterSpec,
    request: Request,
    *,
    database: Database | None = None,
    progress: Progress | None = None,
    company: Company | None = None,
) -> Found:
    """The best plan over all meshes of `cluster`; raises InfeasibleError or SolverError if there is none.

    The pure strategies that come closest are measured like the winner, so that it isn't chosen for
    an estimate of theirs.
    """
    atoms = find_atoms(graph)
    model = CostModel.of(cluster, database)
    whole, cluster = cluster, cluster.stage(request.stages)
    meshes = _meshes(cluster, request)
    _check_mesh(meshes, cluster)
    cap = request.memory if request.memory is not None else cluster.memory
    deadline = None if request.time_limit is None else time.monotonic() + request.time_limit
    for _ in range(MEASURING_ROUNDS if request.measure and model.here else 1):
        problems = [_Mesh(graph, atoms, mesh, cluster, model, request, cap) for mesh in meshes]
        best = _best(problems, deadline)
        known = model
        if request.measure:
            model = model.measure(_calls(graph, best), database, progress, company)
        if model is known and request.measure and model.here and not request.force:
            rivals = itertools.chain.from_iterable(_calls(graph, each) for each in _rivals(best[0], deadline))
            model = model.measure(rivals, database, progress, company)
        if model is known:
            break
    else:
        problems = [_Mesh(graph, atoms, mesh, cluster, model, request, cap) for mesh in meshes]
        best = _best(problems, deadline)
    alternatives = _alternatives(best[0], deadline) if request.alternatives and not request.force else []
    # A pure strategy keeps to no pins: where layers are pinned it may only stand beside the plan.
    found = best if request.pins else _prefer_simpler(best, alternatives, cap)
    if request.recompute:
        found = found[0], _recomputed(found[0], found[1])
    return _report(found[0], found[1], whole, [item for item, _ in alternatives], cap, request)


def measure_operators(
    graph: Graph,
    cluster: ClusterSpec,
    request: Request,
    *,
    database: Database,
    progress: Progress | None = None,
    company: Company | None = None,
) -> int:
    """Measure the calls of the plan that estimates find best, and of every pure strategy, on every mesh.

    So that a later search compares what is measured with what is measured. Returns how many calls the
    database then knows.
    """
    atoms = find_atoms(graph)
    meshes = _meshes(cluster, request)
    _check_mesh(meshes, cluster)
    model = CostModel.of(cluster, database)
    deadline = None if request.time_limit is None else time.monotonic() + request.time_limit
    calls = []
    for mesh in meshes:
        problem = _Mesh(graph, atoms, mesh, cluster, model, request, None)
        for force in (None, *Parallelism):
            with contextlib.suppress(InfeasibleError):
                calls += _calls(graph, (problem, problem.solve(force, deadline, cap=None)))
    model = model.measure(calls, database, progress, company)
    return len({call.key() for call in calls} & model.measured.keys())


@dataclass(slots=True)
class _Mesh:
    """One mesh's problem, solved at most once for each kind that is forced."""

    graph: Graph
    atoms: Atoms
    mesh: Mesh
    cluster: ClusterSpec
    model: CostModel
    request: Request
    cap: int | None

    def __post_init__(self) -> None:
        self.dims = Dims(self.graph, self.atoms, self.mesh)
        self.prices = Prices(
            self.graph,
            self.dims,
            self.cluster,
            self.model,
            training=self.request.training,
            optimizer_states=self.request.optimizer_states,
        )
        pinned = self.request.pins
        self.folding = (
            Folding({item.name: item.name for item in self.graph.operators}, {}, 1)
            if pinned
            else fold(self.graph, self.dims)
        )

    dims: Dims = dataclasses.field(init=False)
    prices: Prices = dataclasses.field(init=False)
    folding: Folding = dataclasses.field(init=False)

    def solve(self, force: Force | None, deadline: float | None, *, cap: int | None) -> Solution:
        if force is not None:
            check_force(self.graph, self.prices, force)
        space = build_space(
            self.graph,
            self.prices,
            self.folding,
            force=force,
            pins=self.request.pins if force is self.request.force else None,
            stored=self.request.stored,
            local_inputs=self.request.local_inputs,
            user_layouts=self.request.user_layouts,
            local_outputs=self.request.local_outputs,
        )
        left = None if deadline is None else max(0.1, deadline - time.monotonic())
        return choose_named(
            self.graph, self.prices, space, self.folding, cap=cap, gap=self.request.gap, time_limit=left
        )


def _meshes(cluster: ClusterSpec, request: Request) -> list[Mesh]:
    """The mesh that is asked for, or all that have an axis for each kind that is forced."""
    if request.mesh:
        return [request.mesh]
    kinds = request.force
    fitting = [
        mesh for mesh in cluster.meshes() if not isinstance(kinds, tuple) or len(kinds) == len(mesh.shape)
    ]
    if not fitting:
        assert isinstance(kinds, tuple)
        raise InfeasibleError(
            where=f"--force {name_of(kinds)}",
            found=f"no mesh of {len(kinds)} axes",
            wanted=f"{len(kinds)} axes of two or more devices each",
            remedy="use more devices, or one kind of parallelism",
        )
    return fitting


def _check_mesh(meshes: Sequence[Mesh], cluster: ClusterSpec) -> None:
    for mesh in meshes:
        if mesh.num_devices != cluster.num_devices:
            raise InputError(
                where="--mesh",
                found=f"{mesh}, {mesh.num_devices} devices",
                wanted=f"a mesh of the cluster's {cluster.num_devices} devices",
                remedy="choose from " + ", ".join(map(str, cluster.meshes())),
            )


def _best(problems: Sequence[_Mesh], deadline: float | None) -> tuple[_Mesh, Solution]:
    found: list[tuple[_Mesh, Solution]] = []
    failures: list[InfeasibleError | SolverError] = []
    for problem in problems:
        try:
            found.append((problem, problem.solve(problem.request.force, deadline, cap=problem.cap)))
        except (InfeasibleError, SolverError) as error:
            failures.append(error)
    if not found:
        raise _worst(failures)
    fastest = min(found, key=lambda pair: pair[1].seconds)
    bound = min(solution.bound for _, solution in found)  # a mesh not solved in time leaves the gap open
    return fastest[0], dataclasses.replace(fastest[1], bound=min(fastest[1].bound, bound))


def _worst(failures: Sequence[InfeasibleError | SolverError]) -> InfeasibleError | SolverError:
    """What all meshes' failures come to: not infeasible while one was not solved in time, and the least
    memory that would do on any mesh."""
    unsolved = [error for error in failures if isinstance(error, SolverError)]
    if unsolved:
        return unsolved[0]
    infeasible = [error for error in failures if isinstance(error, InfeasibleError)]
    return min(infeasible, key=lambda error: math.inf if error.least is None else error.least)


def _calls(graph: Graph, best: tuple[_Mesh, Solution]) -> list:  # type: ignore[type-arg]
    problem, solution = best
    strategies = solution.program.strategies
    prices = (problem.prices.operator(item, strategies[item.name]) for item in graph.operators)
    return list(itertools.chain.from_iterable(price.calls for price in prices))


def _rivals(problem: _Mesh, deadline: float | None) -> list[tuple[_Mesh, Solution]]:
    """The `RIVALS` pure strategies that are predicted fastest."""
    found = [solution for _, solution in _alternatives(problem, deadline) if solution]
    return [(problem, each) for each in sorted(found, key=lambda each: each.seconds)[:RIVALS]]


def _alternatives(problem: _Mesh, deadline: float | None) -> list[tuple[Alternative, Solution | None]]:
    """Every pure strategy of the chosen mesh, solved without the cap so that its need is known; none
    on one device, which has nothing to share."""
    found: list[tuple[Alternative, Solution | None]] = []
    if problem.mesh.num_devices == 1:
        return found
    for kind in Parallelism:
        try:
            solution = problem.solve(kind, deadline, cap=None)
        except (InfeasibleError, SolverError):
            found.append((Alternative(kind.value, None, None, feasible=False), None))
            continue
        fits = problem.cap is None or solution.peak.nbytes <= problem.cap
        row = Alternative(kind.value, solution.seconds, solution.peak.nbytes, feasible=fits)
        found.append((row, solution))
    return found


def _prefer_simpler(
    best: tuple[_Mesh, Solution], alternatives: Sequence[tuple[Alternative, Solution | None]], cap: int | None
) -> tuple[_Mesh, Solution]:
    """Never a plan that is predicted slower than a pure strategy: an incumbent in time may be."""
    problem, solution = best
    faster = [item for row, item in alternatives if item and row.feasible and item.seconds < solution.seconds]
    if not faster:
        return best
    winner = min(faster, key=lambda item: item.seconds)
    return problem, dataclasses.replace(
        winner, bound=min(solution.bound, winner.seconds), status=solution.status
    )


# -- the report --------------------------------------------------------------------------------------------


def _report(
    problem: _Mesh,
    solution: Solution,
    cluster: ClusterSpec,
    alternatives: Sequence[Alternative],
    cap: int | None,
    request: Request,
) -> Found:
    graph, prices, program = problem.graph, problem.prices, solution.program
    kinds = Kinds(graph, prices.dims)
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    paid: set[tuple[str, object]] = set()
    layers = []
    for item in graph.operators:
        strategy: tuple[Option, ...] = program.strategies[item.name]
        price = prices.operator(item, strategy)
        moved = 0.0
        for name in dict.fromkeys(item.operands):
            for move in program.moves.get(name, ()):
                if (name, move) not in paid:
                    paid.add((name, move))
                    moved += (prices.gradient_sync if name in weights else prices.move)(name, move)
        layers.append(
            Layer(
                name=item.name,
                op=str(item.target),
                module=item.module,
                strategy=tuple(option.factor if option.shards else None for option in strategy),
                kinds=tuple(kind.value if (kind := kinds.of(item, option)) else None for option in strategy),
                compute=price.compute,
                communication=price.communication + moved,
                nbytes=solution.peak.by_operator[item.name],
                flops=price.flops
                * math.prod(
                    size for size, option in zip(program.mesh.shape, strategy, strict=True) if option.shards
                ),
            )
        )
    compute = sum(layer.compute for layer in layers)
    estimated = sum(
        prices.operator(item, program.strategies[item.name]).missing_seconds for item in graph.operators
    )
    plan = Plan(
        program=program,
        cluster=str(cluster),
        layers=tuple(layers),
        conversions=tuple(
            f"{name}: {move} ({effect(move).name})" for name, moves in program.moves.items() for move in moves
        ),
        status=solution.status,
        gap=solution.gap,
        step_seconds=solution.seconds,
        compute_seconds=compute,
        communication_seconds=max(0.0, solution.seconds - compute - _update(problem, solution)),
        peak_bytes=solution.peak.nbytes,
        state_bytes=solution.peak.state,
        memory_cap=cap,
        measured_share=1.0 - estimated / compute if compute else 1.0,
        sharded_flops_share=sharded_share(graph, kinds, layers, request.force),
        gathered_ops=tuple(
            f"{item.name} ({item.target})" for item in graph.operators if prices.is_gathered(item)
        ),
        alternatives=tuple(alternatives),
        parameter_bytes=_parameter_bytes(problem, solution),
        notes=graph.notes,
        pipeline=_pipeline(problem, solution, cluster, request),
    )
    return Found(plan, problem.dims, prices, solution)


def _pipeline(problem: _Mesh, solution: Solution, cluster: ClusterSpec, request: Request) -> Pipeline:
    if request.stages == 1:
        return Pipeline(micro_batches=request.micro_batches)
    graph, prices, program = problem.graph, problem.prices, solution.program
    link = cluster.hop(request.stages)
    seconds = [prices.operator(item, program.strategies[item.name]).seconds for item in graph.operators]
    hops = [2 * send_recv(nbytes, link) for nbytes in _crossing_bytes(graph, prices, program)]
    starts = (
        cut(seconds, hops, request.num_stages)
        if request.homes is None
        else _kept_starts(graph, request.homes, request.num_stages)
    )
    return Pipeline(request.stages, request.micro_batches, request.schedule, starts)


def _recomputed(problem: _Mesh, solution: Solution) -> Solution:
    graph, program = problem.graph, solution.program
    kept = [solution.peak.by_operator[item.name] for item in graph.operators]
    found = segments(kept, _crossing_bytes(graph, problem.prices, program))
    return dataclasses.replace(solution, program=dataclasses.replace(program, recompute=found))


def _kept_starts(graph: Graph, homes: Mapping[str, int], stages: int) -> tuple[int, ...]:
    """The cut that leaves every parameter and buffer on its stage: before the first operator that uses
    one of a later stage."""
    targets = {item.name: item.target for item in graph.inputs}
    starts = [0]
    for stage in range(1, stages):
        starts.append(
            next(
                (
                    index
                    for index, item in enumerate(graph.operators)
                    if any(homes.get(targets.get(name, ""), 0) >= stage for name in item.operands)
                ),
                len(graph.operators),
            )
        )
    return tuple(starts)


def _crossing_bytes(graph: Graph, prices: Prices, program: Program) -> list[int]:
    """For each operator the local bytes of what earlier ones made that it or later ones use."""
    made: dict[str, tuple[int, int]] = {}
    for index, item in enumerate(graph.operators):
        strategy = program.strategies[item.name]
        for place, name in enumerate(item.results):
            if name and graph.specs[name].requires_grad:
                layout = tuple(option.results[place] for option in strategy)
                made[name] = index, prices.local_bytes(name, layout)
    last = {name: index for index, item in enumerate(graph.operators) for name in item.operands}
    change = [0] * (len(graph.operators) + 1)
    for name, (index, nbytes) in made.items():
        if name in last:
            change[index + 1] += nbytes
            change[last[name] + 1] -= nbytes
    return list(itertools.accumulate(change))[:-1]


def _update(problem: _Mesh, solution: Solution) -> float:
    weights = [item.name for item in problem.graph.inputs if item.kind is InputKind.PARAMETER]
    return sum(problem.prices.update(name, solution.program.inputs[name]) for name in weights)


def _parameter_bytes(problem: _Mesh, solution: Solution) -> tuple[int, ...]:
    weights = [item for item in problem.graph.inputs if item.kind is InputKind.PARAMETER]
    mesh, layouts = problem.mesh, solution.program.inputs
    return tuple(
        sum(
            math.prod(problem.dims.local_shape(item.name, layouts[item.name], mesh.coordinate(rank)))
            * item.spec.dtype.itemsize
            for item in weights
        )
        for rank in range(mesh.num_devices)
    )


def sharded_share(graph: Graph, kinds: Kinds, layers: Sequence[Layer], force: Force | None) -> float:
    """The part of all flops that operators do which are sharded.

    With `force`, only of operators that have a factor of the kind that is forced on an axis, as long as
    the axis, and only those count as sharded that are so on as many axes as their factors are long
    enough for.
    """
    wanted = [kind.value for kind in kind_by_axis(force, kinds.dims.mesh)] if force else []
    total = sharded = 0
    for item, layer in zip(graph.operators, layers, strict=True):
        axes = 1 if force is None else kinds.room(item, force)
        done = sum(
            kind is not None and kind == want
            for kind, want in zip(layer.kinds, wanted or layer.kinds, strict=True)
        )
        total += layer.flops if axes else 0
        sharded += layer.flops if axes and done >= axes else 0
    return sharded / total if total else 0.0


def check_force(graph: Graph, prices: Prices, force: Force) -> None:
    """Raise InfeasibleError for a kind of which no operator that computes has a factor as long as an axis."""
    kinds, mesh = Kinds(graph, prices.dims), prices.dims.mesh
    heavy = [item for item in graph.operators if is_heavy(item, prices)]
    by_axis = kind_by_axis(force, mesh)
    for wanted in dict.fromkeys(by_axis):
        least = min((mesh.shape[axis] for axis in kinds.axes() if by_axis[axis] is wanted), default=1)
        longest = max((kinds.longest(item, wanted) for item in heavy), default=0)
        if longest < least or not longest:
            raise InfeasibleError(
                where=f"--force {name_of(force)} on mesh {mesh}",
                found=f"no {wanted.value} factor longer than {longest}"
                if longest
                else f"no {wanted.value} factor",
                wanted=f"an operator with one of at least {least}, the size of an axis",
                remedy="choose another kind, a smaller mesh or larger inputs",
            )
