"""Plans without a solver: the first strategy that a preference allows, conversions by the path finder.

    force(graph, dims, ["d0", "n"])      shard the batch wherever an operator can, else gather

The rest of the pipeline is the real one, so what the tests run is what users run.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import autopar.ops
import autopar.runtime.collectives.placement_moves
import autopar.runtime.collectives.random  # noqa: F401  (registers the operators that programs call)
from autopar import compiler
from autopar.cluster import ClusterSpec
from autopar.convert.path import tree
from autopar.core.costs import DeviceModel
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline, kept_starts
from autopar.core.placement import B, Layout, P, Partial, R, Shard
from autopar.core.program import Program
from autopar.core.strategy import GATHERED, Option, Strategy
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.cost.program.offload import movable
from autopar.planning.request import Request
from autopar.results.plan import Plan
from autopar.runtime.execute.executable import Executable
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms, strategies_of
from autopar.solve.placement.space import storable
from autopar.trace.call_signature import LossFunction
from autopar.trace.export import Traced

ROUGH = CostModel(
    DeviceModel(
        "rough", "cpu", ((torch.float32, 1e9), (torch.float64, 1e9)), bandwidth=1e9, launch_seconds=1e-6
    ),
    {},
    CollectiveTable({}),
)
Prefer = Callable[[Operator, Option], float]  # the highest wins on each axis


def kinds(graph: Graph, operation: Operator, option: Option) -> str:
    """What an option is called: batch, filter, channel, domain, or the unsharded options' marks."""
    if not option.shards:
        return option.factor
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    sharded = [
        placement
        for name, placement in zip(operation.operands, option.operands, strict=True)
        if name in weights and isinstance(placement, Shard)
    ]
    if sharded:
        return "channel" if P in option.results else "filter"
    first = next((item for item in option.operands if isinstance(item, Shard)), None)
    return "batch" if first == Shard(0) else "domain"


def force(
    graph: Graph,
    dims: Dims,
    wanted: Mapping[str, Sequence[str]] | Sequence[str],
    *,
    stored: Mapping[str, Layout] | None = None,
    users: Mapping[str, Layout] | None = None,
    gathering: Gathering | None = None,
) -> Program:
    """For each axis a kind of parallelism (`wanted`), for single operators other ones, by module name.

    Operators that don't offer it run on gathered operands. Parameters are stored as their first
    consumer takes them, or as `stored` says; so are user inputs, by `users`. With `gathering` those that
    learn are stored in shards over every axis on which they can be.
    """
    default = wanted if isinstance(wanted, Sequence) else wanted["*"]
    single = {} if isinstance(wanted, Sequence) else wanted
    strategies: dict[str, Strategy] = {}
    for operation in graph.operators:
        strategies[operation.name] = _choose(graph, operation, dims, single.get(operation.module, default))
    return _convert(graph, dims, strategies, stored=stored or {}, users=users or {}, gathering=gathering)


def _choose(graph: Graph, operation: Operator, dims: Dims, kinds_wanted: Sequence[str]) -> Strategy:
    def score(strategy: Strategy) -> tuple[int, int]:
        named = [kinds(graph, operation, option) for option in strategy]
        right = sum(name == want for name, want in zip(named, kinds_wanted, strict=True))
        return right, sum(option.factor == GATHERED for option in strategy)

    return max(strategies_of(operation, dims), key=score)


def _convert(
    graph: Graph,
    dims: Dims,
    strategies: Mapping[str, Strategy],
    *,
    stored: Mapping[str, Layout],
    users: Mapping[str, Layout],
    gathering: Gathering | None,
) -> Program:
    whole: Layout = (R,) * len(dims.mesh.shape)
    needs: dict[str, list[Layout]] = {name: [] for name in graph.specs}
    sources: dict[str, Layout] = {}
    for operation in graph.operators:
        strategy = strategies[operation.name]
        for index, name in enumerate(operation.operands):
            needs[name].append(tuple(option.operands[index] for option in strategy))
        for index, result in enumerate(operation.results):
            if result:
                sources[result] = tuple(option.results[index] for option in strategy)
    for item in graph.inputs:
        first = needs[item.name][0] if needs[item.name] else whole
        free = tuple(R if placement in (B, P) else placement for placement in first)
        fixed = users if item.kind is InputKind.USER else stored
        if gathering is not None and item.kind is InputKind.PARAMETER and item.spec.requires_grad:
            free = in_shards(item.name, free, dims)
        sources[item.name] = fixed.get(item.target, free)
    for name in graph.outputs:
        needs[name].append(whole)
    for buffer, value in graph.writes:
        needs[value].append(sources[buffer])
    moves = {
        name: tree(
            sources[name],
            wanted,
            lambda move: 1.0 + any(isinstance(item, Partial) for item in move.target),
            legal=lambda layout, name=name: dims.legal(name, layout),
            differentiable=graph.specs[name].requires_grad,
        )
        for name, wanted in needs.items()
    }
    inputs = {item.name: sources[item.name] for item in graph.inputs}
    sharded = {
        item.name: gathering
        for item in graph.inputs
        if gathering is not None and any(isinstance(place, Shard) for place in sources[item.name])
    }
    return Program(
        dims.mesh, inputs, strategies, moves, dict.fromkeys(graph.outputs, whole), gatherings=sharded
    )


def in_shards(name: str, layout: Layout, dims: Dims) -> Layout:
    """`layout` with a shard of the first dim that is long enough on every axis that has none."""
    for axis, place in enumerate(layout):
        choices = [place] if place != R else [*map(Shard, range(len(dims.atoms.of[name]))), R]
        every = [(*layout[:axis], choice, *layout[axis + 1 :]) for choice in choices]
        layout = next(item for item in every if item == layout or storable(name, item, dims))
    return layout


@dataclass(frozen=True, slots=True)
class Compiler(compiler.Compiler):
    """A `compile` for ParallelModule that forces one plan; counts what it has compiled.

    `mesh` is that of one stage; `pipeline` says how often there are stages of it, and from which
    operators on they are.
    """

    mesh: Mesh = Mesh((1,))
    wanted: Any = ()
    pipeline: Pipeline = Pipeline()
    gathering: Gathering | None = None
    recompute: bool = False  # all but the last operator, the loss
    offload: bool = False  # all that one stage makes and reads, but what backward reads first
    graphs: list[Graph] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.graphs)

    def agree(self, traced: Traced, request: Request) -> Plan:
        """No search, so nothing to agree on."""
        graph = traced.graph
        self.graphs.append(graph)
        dims = Dims(graph, find_atoms(graph), self.mesh)
        program = force(
            graph,
            dims,
            self.wanted,
            stored=request.stored,
            users=request.user_layouts,
            gathering=self.gathering,
        )
        if self.recompute:
            program = replace(program, recompute=((0, len(graph.operators) - 1),))
        starts = self.pipeline.starts
        if request.homes is not None:
            starts = kept_starts(graph, request.homes, len(starts))
        if self.offload:
            prices = Prices(graph, dims, self.cluster.stage(request.stages), ROUGH)
            items = movable(graph, prices, program)[:-1]
            own = (item for item in items if bisect(starts, item.home) == bisect(starts, item.needed - 1))
            program = replace(program, offload=tuple(item.moved for item in own))
        if request.stages == 1:
            return plan_of(program, Pipeline(micro_batches=request.micro_batches))
        return plan_of(program, replace(self.pipeline, starts=starts))


def forced(
    mesh: Mesh,
    wanted: Any,
    *,
    pipeline: Pipeline | None = None,
    loss_fn: LossFunction | None = None,
    gathering: Gathering | None = None,
    recompute: bool = False,
    offload: bool = False,
) -> Compiler:
    """The compiler of one plan for the kinds of parallelism that are `wanted`."""
    pipeline = pipeline or Pipeline()
    request = Request(stages=pipeline.ranks, micro_batches=pipeline.micro_batches, schedule=pipeline.schedule)
    cluster = ClusterSpec.local(mesh.num_devices * pipeline.ranks)
    return Compiler(
        cluster,
        request,
        loss_fn,
        exact_random=True,
        mesh=mesh,
        wanted=wanted,
        pipeline=pipeline,
        gathering=gathering,
        recompute=recompute,
        offload=offload,
    )


def plan_of(program: Program, pipeline: Pipeline) -> Plan:
    """A plan without predictions."""
    return Plan(
        program=program,
        cluster="forced",
        layers=(),
        conversions=(),
        status="forced",
        gap=0.0,
        step_seconds=0.0,
        compute_seconds=0.0,
        communication_seconds=0.0,
        peak_bytes=0,
        state_bytes=0,
        memory_cap=None,
        measured_share=0.0,
        sharded_flops_share=0.0,
        gathered_ops=(),
        alternatives=(),
        parameter_bytes=(),
        pipeline=pipeline,
    )


def weight_bytes(programs: Sequence[Executable]) -> int:
    """Bytes of one rank's parameters; programs of several stages share those that they have in common."""
    weights = {
        item.target: math.prod(item.part.shape) * item.spec.dtype.itemsize
        for program in programs
        for item in program.inputs
        if item.kind is InputKind.PARAMETER
    }
    return sum(weights.values())
