"""A compiler that takes a plan of forced strategies instead of searching for one.

    ParallelModule(model, forced_compiler(Mesh((2,)), ["batch"]), ...)

The rest of the pipeline is the real one, so what the tests run is what users run.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from autopar import compiler
from autopar.cluster import ClusterSpec
from autopar.core.costs import DeviceModel
from autopar.core.fingerprint import fingerprint_of
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline, kept_starts
from autopar.core.program import Program
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.prices import Prices
from autopar.cost.program.offload import movable
from autopar.cost.program.priced_program import PricedProgram
from autopar.planning.asked.request import Request
from autopar.results.plan.plan import Plan
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.call.call_signature import LossFunction
from autopar.trace.export import Traced
from tests.forced_programs import Wanted, force_kinds

ROUGH = CostModel(
    DeviceModel(
        "rough", "cpu", ((torch.float32, 1e9), (torch.float64, 1e9)), bandwidth=1e9, launch_seconds=1e-6
    ),
    {},
    CollectiveTable({}),
)


@dataclass(frozen=True, slots=True)
class ForcedCompiler(compiler.Compiler):
    """A `compile` for ParallelModule that forces one plan; counts what it has compiled.

    `mesh` is that of one stage; `pipeline` says how often there are stages of it, and from which
    operators on they are.
    """

    mesh: Mesh = Mesh((1,))
    wanted: Wanted = ()
    pipeline: Pipeline = Pipeline()
    gathering: Gathering | None = None
    recompute: bool = False  # all but the last operator, the loss
    together: bool = False  # groups of weights are gathered at once
    offload: bool = False  # all that one stage makes and reads, but what backward reads first
    on_host: bool = False  # weights, their gradients and what the optimizer keeps
    ahead: bool = False  # these are copied an operator ahead
    keeps: bool = False  # a plan for graphs that differ from its own in numbers alone, as the search's are
    graphs: list[Graph] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.graphs)

    def agree(self, traced: Traced, request: Request) -> Plan:
        """No search, so nothing to agree on."""
        graph = traced.graph
        self.graphs.append(graph)
        dims = Dims(graph, find_atoms(graph), self.mesh)
        program = force_kinds(
            graph,
            dims,
            self.wanted,
            stored=request.stored,
            users=request.user_layouts,
            gathering=self.gathering,
        )
        if self.on_host:
            weights = [item.name for item in graph.inputs if item.kind is InputKind.PARAMETER]
            program = replace(program, on_host=tuple(weights), ahead=tuple(weights) if self.ahead else ())
        if self.recompute:
            program = replace(program, recompute=((0, len(graph.operators) - 1),))
        starts = self.pipeline.starts
        if request.stages_of_uses is not None:
            starts = kept_starts(graph, request.stages_of_uses, len(starts))
        if self.offload:
            prices = Prices(graph, dims, self.cluster.stage(request.pipeline_ranks), ROUGH)
            items = movable(PricedProgram(prices, program))[:-1]
            own = (item for item in items if bisect(starts, item.maker) == bisect(starts, item.needed - 1))
            program = replace(program, offload=tuple(item.tensor for item in own))
        if self.together:
            prices = Prices(graph, dims, self.cluster.stage(self.pipeline.ranks), ROUGH)
            program = PricedProgram(prices, program).gathered_together(None, starts).program
        pipeline = replace(self.pipeline, starts=starts)
        if request.pipeline_ranks == 1:
            pipeline = Pipeline(micro_batches=request.micro_batches)
        plan = plan_of(program, pipeline)
        return replace(plan, graph=fingerprint_of(graph)) if self.keeps else plan


def forced_compiler(
    mesh: Mesh,
    wanted: Wanted,
    *,
    pipeline: Pipeline | None = None,
    loss_fn: LossFunction | None = None,
    gathering: Gathering | None = None,
    recompute: bool = False,
    together: bool = False,
    offload: bool = False,
    on_host: bool = False,
    ahead: bool = False,
    keeps: bool = False,
) -> ForcedCompiler:
    """The compiler of one plan for the kinds of parallelism that are `wanted`."""
    pipeline = pipeline or Pipeline()
    request = Request(
        pipeline_ranks=pipeline.ranks, micro_batches=pipeline.micro_batches, schedule=pipeline.schedule
    )
    cluster = ClusterSpec.local(mesh.num_devices * pipeline.ranks)
    return ForcedCompiler(
        cluster,
        request,
        loss_fn,
        exact_random=True,
        mesh=mesh,
        wanted=wanted,
        pipeline=pipeline,
        gathering=gathering,
        recompute=recompute,
        together=together,
        offload=offload,
        on_host=on_host,
        ahead=ahead,
        keeps=keeps,
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


def train_together(models: Sequence[nn.Module], batches: Iterable[tuple[Tensor, ...]]) -> None:
    """A step of SGD with momentum for each batch, by each of the models, whose output is the loss."""
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    for batch in batches:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
