"""From a model to one rank's executable: trace, search, rewrite, defer the gradient sums.

Rank 0 plans and sends the plan; every rank rewrites its own program from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autopar.agree import agree, measure_links
from autopar.cluster import ClusterSpec
from autopar.core.executable import Executable, InputPart, Pinned
from autopar.core.graph import Graph, InputKind
from autopar.core.plan import Plan
from autopar.cost.model import Company, Progress
from autopar.errors import CheckError
from autopar.ops.analysis import find_atoms
from autopar.ops.dims import Dims
from autopar.planning import Request, search
from autopar.rewrite.program import rewrite
from autopar.rewrite.samples import find_samples
from autopar.rewrite.sync import defer
from autopar.signature import LossFunction
from autopar.trace import Traced, trace
from costdb.database import Database


@dataclass(frozen=True, slots=True)
class Compiler:
    """Makes the executables of one parallel module.

    With `plan` set, that plan is taken instead of a search, and with `traced` it is one of that graph,
    whatever the model. `loss_only` says whether the model's own output leaves the program beside the
    loss of `loss_fn`.
    """

    cluster: ClusterSpec
    request: Request
    loss_fn: LossFunction | None = None
    loss_only: bool = True
    costdb: str | None = None
    exact_random: bool = False
    progress: Progress | None = None
    plan: Plan | None = None
    timeout: timedelta = timedelta(minutes=10)  # of process groups
    traced: Traced | None = None

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        pinned: Pinned | None,
    ) -> Executable:
        """This rank's program for one kind of call; collective."""
        traced = self.traced or trace(model, args, kwargs, loss_fn=self.loss_fn, loss_only=self.loss_only)
        request = self.request  # for training: backward may follow in eval mode as well
        if pinned is not None:
            request = replace(request, mesh=pinned.mesh, stored=pinned.stored, user_layouts=pinned.users)
        plan = self.plan if self.plan is not None and pinned is None else self.agree(traced, request)
        return build(traced, plan, rank=dist.get_rank(), device=self.device(), exact_random=self.exact_random)

    def device(self) -> torch.device:
        if self.cluster.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def agree(self, traced: Traced, request: Request) -> Plan:
        """Rank 0's plan on every rank; its error on every rank if it has none."""
        if request.measure and self.cluster.device_type == "cpu" and self.cluster.nodes == 1:
            measure_links(self.cluster, self.costdb, self.timeout)

        def find(company: Company) -> tuple[Plan, str]:
            return self.find(traced.graph, request, company), graph_digest(traced.graph)

        plan, digest = agree(find, self.cluster)
        if digest != graph_digest(traced.graph):
            raise CheckError(
                where=f"rank {dist.get_rank()}",
                found="a model that traces differently from rank 0's",
                wanted="the same model, mode and input shapes on every rank",
                remedy="build the model and the batch alike on all ranks",
            )
        return plan

    def find(self, graph: Graph, request: Request, company: Company | None = None) -> Plan:
        """Search, with the cost database open."""
        with Database.open(self.costdb) as database:
            return search(
                graph, self.cluster, request, database=database, progress=self.progress, company=company
            ).plan


def graph_digest(graph: Graph) -> str:
    """Equal for graphs that are planned alike."""
    parts = [f"{item.target}{item.args}{item.kwargs}{item.results}" for item in graph.operators]
    parts += [f"{item.name}{item.target}{item.spec}" for item in graph.inputs]
    return hashlib.sha256("\n".join([*parts, *graph.outputs]).encode()).hexdigest()


def build(
    traced: Traced, plan: Plan, *, rank: int, device: torch.device | None = None, exact_random: bool = False
) -> Executable:
    """One rank's executable under `plan`; needs no process group."""
    graph, program = traced.graph, plan.program
    dims = Dims(graph, find_atoms(graph), plan.mesh)
    mine = rewrite(graph, program, dims, rank=rank, device=device, exact_random=exact_random)
    parameters = [item.name for item in graph.inputs if item.kind is InputKind.PARAMETER]
    body, sums = defer(mine.graph, parameters)
    users, coordinate = list(traced.arguments.paths), plan.mesh.coordinate(rank)
    inputs = tuple(
        InputPart(
            name=item.name,
            kind=item.kind,
            target=item.target,
            spec=item.spec,
            layout=program.inputs[item.name],
            part=dims.part(item.name, program.inputs[item.name], coordinate),
            aliases=item.aliases,
            mutated=item.mutated,
            sync=sums.get(item.name),
            position=users.index(item.target) if item.kind is InputKind.USER else -1,
        )
        for item in graph.inputs
    )
    return Executable(
        mesh=plan.mesh,
        module=fx.GraphModule(nn.Module(), body, class_name="ParallelProgram"),
        inputs=inputs,
        outputs=tuple(dims.part(name, program.outputs[name], coordinate) for name in graph.outputs),
        writes=tuple(buffer for buffer, _ in graph.writes),
        rebuild=traced.results.rebuild,
        groups=tuple(sorted(_group_keys(body) | set(sums.values()))),
        constants={item.target: item.value for item in graph.inputs if item.value is not None},
        plan=plan,
        layers=mine.layers,
        samples=find_samples(graph, program.inputs, dims),
    )


def _group_keys(graph: fx.Graph) -> set[str]:
    """Every group key that the program names."""
    arguments = (item for node in graph.nodes if node.op == "call_function" for item in node.args)
    return {item for item in arguments if isinstance(item, str) and "@" in item}
