"""From a model to one rank's executable: trace, search, rewrite, defer the gradient sums.

Rank 0 plans and sends the plan; every rank rewrites its own program from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autopar.agree import agree, measure_links
from autopar.auto import decide_all
from autopar.cluster import ClusterSpec
from autopar.core.executable import Executable, InputPart, Pinned, StagedExecutable
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, InputKind
from autopar.core.plan import Plan, Program
from autopar.cost.model import Company, Progress
from autopar.errors import CheckError, InfeasibleError, InputError, TraceError
from autopar.garbage import uncollected
from autopar.micro_batches import batch_length, cut_inputs, is_sum, reducer_of, split_batch
from autopar.ops.analysis import find_atoms
from autopar.ops.dims import Dims
from autopar.ops.independence import mixing_operator, rows_instead
from autopar.planning import decide, finish, search
from autopar.request import Auto, Request
from autopar.rewrite.program import RankProgram, rewrite
from autopar.rewrite.recompute import recomputing
from autopar.rewrite.samples import find_samples
from autopar.rewrite.shorter import check_plan, check_programs
from autopar.rewrite.stages import StageProgram, split
from autopar.rewrite.sync import Deferred, defer
from autopar.signature import Arguments, LossFunction, flatten_arguments
from autopar.simplify import only_loss, with_masks_by_dims, without_gradients
from autopar.trace import Traced, trace
from costdb.database import Database


@dataclass(frozen=True, slots=True)
class Compiler:
    """Makes the executables of one parallel module.

    With `plan` set, that plan is taken instead of a search for the first call, and with `traced` it is
    one of that graph, whatever the model; `shorter` is then the graph of shorter micro-batches, and exact
    masks of any graph are drawn in the order of dims, as in proofs. `loss_only`
    says whether the model's own output leaves the program beside the loss of `loss_fn`.
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
    shorter: Traced | None = None

    @uncollected()
    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        pinned: Pinned | None,
        step: bool = False,
    ) -> Executable | StagedExecutable:
        """This rank's program for one kind of call; collective."""
        request = self._request(pinned, training=training, step=step)
        if self.traced is not None and pinned is None:
            traced = self.traced
        elif step:
            traced = self.trace_step(model, args, kwargs)
        else:
            traced = trace(model, args, kwargs, loss_fn=self.loss_fn, loss_only=self.loss_only)
        if self.traced is not None:
            traced = replace(traced, graph=with_masks_by_dims(traced.graph))
        if not training:
            traced = replace(traced, graph=without_gradients(traced.graph))
        plan = self.plan if self.plan is not None and pinned is None else self.agree(traced, request)
        rank, device = dist.get_rank(), self.device()
        if not plan.pipeline.is_staged:
            return build(traced, plan, rank=rank, device=device, exact_random=self.exact_random)
        made = build_stages(traced, plan, rank=rank, device=device, exact_random=self.exact_random)
        if not step:
            return made
        shorter = self.trace_shorter(model, args, kwargs, traced, plan, training=training)
        if shorter is None:
            return made
        rest = build_stages(shorter, plan, rank=rank, device=device, exact_random=self.exact_random)
        check_programs(made, rest)
        return replace(made, shorter=rest.stages)

    def _request(self, pinned: Pinned | None, *, training: bool, step: bool) -> Request:
        """What is asked of the search for one kind of call."""
        request = replace(self.request, training=training)
        if pinned is not None:
            request = replace(request, mesh=pinned.mesh, stored=pinned.stored, user_layouts=pinned.users)
        if pinned is not None and pinned.pipeline.is_staged:
            request = replace(request, homes=pinned.homes, schedule=pinned.pipeline.schedule)
            return request if step else replace(request, micro_batches=1, relay=True, local_outputs=False)
        return request if step else replace(request, micro_batches=1, stages=1)

    def trace_step(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The graph of the first micro-batch of a global batch; with stages its loss is the only output."""
        staged = self.request.stages > 1
        return self.trace_part(model, args, kwargs, self.request.micro_batches, staged=staged)

    def trace_part(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count: int,
        *,
        staged: bool,
        place: int = 0,
    ) -> Traced:
        """The graph of the first of `count` micro-batches, or that at another `place`.

        Raises InputError where the loss is not over what micro-batches take in parts.
        """
        call = flatten_arguments(args, kwargs)
        micro = split_batch(call.tensors, count)[place]
        args, kwargs = call.rebuild(micro.tensors)
        try:
            traced = trace(model, args, kwargs, loss_fn=self.loss_fn, loss_only=self.loss_only)
        except TraceError as error:
            if count > 1:
                error.add_remedy(f"choose fewer than {count} micro-batches, if the whole batch can be traced")
            raise
        if count > 1:
            check_rows(traced.graph, call)
        if staged:
            traced = replace(traced, graph=only_loss(traced.graph))
        return traced

    def trace_shorter(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        traced: Traced,
        plan: Plan,
        *,
        training: bool = True,
    ) -> Traced | None:
        """The graph of the shorter micro-batches, None where all are of the length of `traced`, the first;
        raises InputError where `plan`, which has stages, doesn't hold for it."""
        count = plan.pipeline.micro_batches
        if not plan.pipeline.is_staged or batch_length(flatten_arguments(args, kwargs).tensors) % count == 0:
            return None
        shorter = self.shorter or self.trace_part(model, args, kwargs, count, staged=True, place=-1)
        if not training:
            shorter = replace(shorter, graph=without_gradients(shorter.graph))
        check_plan(plan.program, traced.graph, shorter.graph)
        return shorter

    def check_lengths(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan
    ) -> None:
        """Raise InputError for a plan with stages that doesn't hold for the shorter micro-batches."""
        count = plan.pipeline.micro_batches
        if plan.pipeline.is_staged and batch_length(flatten_arguments(args, kwargs).tensors) % count:
            traced = self.trace_part(model, args, kwargs, count, staged=True)
            self.trace_shorter(model, args, kwargs, traced, plan)

    @uncollected()
    def find_pipeline(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        auto: Auto,
        company: Company | None = None,
    ) -> Plan:
        """The best plan where the number of stages, of micro-batches, or both are to be chosen.

        A model that mixes samples keeps one micro-batch, unless more are asked for.
        """
        stages, micro_batches, exactly = auto
        whole = self.trace_part(model, args, kwargs, 1, staged=False).graph
        plain = replace(self.request, stages=1, micro_batches=1)
        if whole.loss is None and stages in (None, 1) and micro_batches in (None, 1):
            return self.find(whole, plain, company)
        call = flatten_arguments(args, kwargs)
        samples = batch_length(call.tensors)
        rows = other_rows(whole, call)
        reason = rows or together(whole, samples) if micro_batches is None else None
        kept = reason is not None and (exactly or rows is not None)
        note = None
        if reason is not None:
            asked = "" if rows else ", unless more are asked for"
            note = f"{reason}: " + (f"one micro-batch{asked}" if kept else "of every micro-batch by itself")
        if stages == 1 and (plan := self.find_unhindered(whole, plain, company)):
            return _noted(plan, note)

        def graph_of(count: int) -> Graph:
            if count == 1:
                return only_loss(whole)
            return self.trace_part(model, args, kwargs, count, staged=True).graph

        try:
            with Database.open(self.costdb) as database:
                decision = decide_all(
                    graph_of,
                    samples,
                    self.cluster,
                    self.request,
                    stages=stages,
                    micro_batches=1 if kept else micro_batches,
                    database=database,
                    progress=self.progress,
                    company=company,
                )
        except InfeasibleError as error:
            if kept and rows is None:
                error.add_remedy(f"allow micro-batches (--micro-batches auto), although {reason}")
            raise
        if decision.request.stages == decision.request.micro_batches == 1:
            plan = self.find(whole, replace(plain, mesh=decision.problem.mesh), company)
        else:
            plan = finish(decision).plan
        return _noted(plan, note)

    def agree_on_pipeline(
        self, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], auto: Auto
    ) -> Request:
        """The request with the pipeline that rank 0 chooses for all; collective."""
        args, kwargs = call
        if not args and not kwargs:
            raise InputError(
                where="parallelize",
                found="stages or micro-batches to be chosen, and no example of the batch",
                wanted="an example of the global batch",
                remedy="pass example_inputs, or give both numbers",
            )

        def find(company: Company) -> tuple[Plan, str]:
            return self.find_pipeline(model, args, kwargs, auto, company), ""

        self.measure_links()
        plan, _ = agree(find, self.cluster)
        return self.request.settled(plan)

    def find_unhindered(self, graph: Graph, request: Request, company: Company | None = None) -> Plan | None:
        """The best plan if memory makes nothing slower: several micro-batches without stages would only
        spare some."""
        with Database.open(self.costdb) as database:
            try:
                decision = decide(
                    graph, self.cluster, request, database=database, progress=self.progress, company=company
                )
            except InfeasibleError:
                return None
            return finish(decision).plan if decision.unhindered else None

    def device(self) -> torch.device:
        if self.cluster.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def measure_links(self) -> None:
        """Measure the collectives that nobody has measured, where plans may measure; collective."""
        if self.request.measure and self.cluster.device_type == "cpu":
            measure_links(self.cluster, self.costdb, self.timeout)

    def agree(self, traced: Traced, request: Request) -> Plan:
        """Rank 0's plan on every rank; its error on every rank if it has none."""
        self.measure_links()

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

    @uncollected()
    def find(self, graph: Graph, request: Request, company: Company | None = None) -> Plan:
        """Search, with the cost database open."""
        with Database.open(self.costdb) as database:
            return search(
                graph, self.cluster, request, database=database, progress=self.progress, company=company
            ).plan


def _noted(plan: Plan, note: str | None) -> Plan:
    return plan if note is None else replace(plan, notes=(*plan.notes, note))


def together(graph: Graph, samples: int) -> str | None:
    """Why micro-batches of the graph would not compute what the batch does, or None if they would."""
    reducer = reducer_of(graph)
    if reducer is None:
        return "the loss is no plain mean or sum of samples"
    mixing = mixing_operator(graph, samples, end=reducer)
    if mixing is None:
        return None
    return f"{mixing.module or mixing.name} ({mixing.target}) takes samples together"


def other_rows(graph: Graph, call: Arguments) -> str | None:
    """Which rows the loss is over, where not over those of the batch, or None."""
    instead = rows_instead(graph, cut_inputs(call.paths, call.tensors))
    if not instead:
        return None
    first = next(path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor.dim())
    rows = ", ".join(f"{item.target} ({item.spec.shape[0]})" for item in instead)
    return f"a loss over the rows of {rows}, not of the first input, {first} ({batch_length(call.tensors)})"


def check_rows(graph: Graph, call: Arguments) -> None:
    """Raise InputError where the loss of `graph`, a micro-batch's, is over rows that it takes whole."""
    if found := other_rows(graph, call):
        raise InputError(
            where="micro-batches",
            found=found,
            wanted="samples in the rows of the first input, and as many in all that go with them",
            remedy="pass inputs that hold a row for each sample, padded where samples differ in length, or "
            "leave out --micro-batches",
        )


def graph_digest(graph: Graph) -> str:
    """Equal for graphs that are planned alike."""
    parts = [f"{item.target}{item.args}{item.kwargs}{item.results}" for item in graph.operators]
    parts += [f"{item.name}{item.target}{item.spec}" for item in graph.inputs]
    return hashlib.sha256("\n".join([*parts, *graph.outputs]).encode()).hexdigest()


def build(
    traced: Traced, plan: Plan, *, rank: int, device: torch.device | None = None, exact_random: bool = False
) -> Executable:
    """One rank's executable under `plan`, which has no stages; needs no process group."""
    graph, program = traced.graph, plan.program
    dims = Dims(graph, find_atoms(graph), plan.mesh)
    mine = rewrite(graph, program, dims, rank=rank, device=device, exact_random=exact_random)
    parameters = [item.name for item in graph.inputs if item.kind is InputKind.PARAMETER]
    body, deferred = defer(mine.graph, parameters, _gathered_once(program))
    coordinate = plan.mesh.coordinate(rank)
    return Executable(
        mesh=plan.mesh,
        module=recomputing(body, mine, traced.graph, program, name="ParallelProgram"),
        inputs=_parts(traced, plan, dims, rank, deferred),
        outputs=tuple(dims.part(name, program.outputs[name], coordinate) for name in graph.outputs),
        writes=tuple(buffer for buffer, _ in graph.writes),
        rebuild=traced.results.rebuild,
        groups=tuple(sorted(_group_keys(body) | _deferred_keys(deferred))),
        constants={item.target: item.value for item in graph.inputs if item.value is not None},
        plan=plan,
        layers=mine.layers,
        samples=find_samples(graph, program.inputs, dims),
        loss_is_sum=is_sum(graph),
    )


def build_stages(
    traced: Traced, plan: Plan, *, rank: int, device: torch.device | None = None, exact_random: bool = False
) -> StagedExecutable:
    """The executables of the stages of one rank of the world, whose graph has the loss as its output."""
    graph, pipeline = traced.graph, plan.pipeline
    mine, place = divmod(rank, plan.mesh.num_devices)
    dims = Dims(graph, find_atoms(graph), plan.mesh)
    whole = rewrite(graph, plan.program, dims, rank=place, device=device, exact_random=exact_random)
    cut = split(whole, graph, pipeline.starts)
    stages = tuple(
        _stage(traced, plan, dims, place, whole, cut[index], stage=index)
        for index in pipeline.stages_of(mine)
    )
    users: dict[str, list[int]] = {
        item.target: found
        for item in graph.inputs
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        if (found := [index for index, each in enumerate(cut) if item.name in each.inputs])
    }
    return StagedExecutable(
        mesh=plan.mesh,
        pipeline=pipeline,
        stages=stages,
        inputs=_parts(traced, plan, dims, place, {}),
        holders={target: tuple(sorted(set(map(pipeline.rank_of, each)))) for target, each in users.items()},
        homes={target: each[0] for target, each in users.items()},
        groups=tuple(sorted({key for each in stages for key in each.groups})),
        outputs=tuple(graph.specs[name] for name in graph.outputs),
        loss_is_sum=is_sum(graph),
        plan=plan,
    )


def _stage(
    traced: Traced,
    plan: Plan,
    dims: Dims,
    place: int,
    whole: RankProgram,
    program: StageProgram,
    *,
    stage: int,
) -> Executable:
    graph, coordinate = traced.graph, plan.mesh.coordinate(place)
    parameters = [item.name for item in graph.inputs if item.kind is InputKind.PARAMETER]
    body, deferred = defer(program.graph, parameters, _gathered_once(plan.program))
    inputs = [item for item in _parts(traced, plan, dims, place, deferred) if item.name in program.inputs]
    constants = {item.target: item.value for item in graph.inputs if item.value is not None}
    return Executable(
        mesh=plan.mesh,
        module=recomputing(body, whole, graph, plan.program, name=f"Stage{stage}"),
        inputs=tuple(inputs),
        outputs=tuple(dims.part(name, plan.program.outputs[name], coordinate) for name in program.outputs),
        writes=program.writes,
        rebuild=traced.results.rebuild,
        groups=tuple(sorted(_group_keys(body) | _deferred_keys(deferred))),
        constants=constants,
        plan=plan,
        stage=stage,
        received=program.received,
        sent=program.sent,
        layers=whole.layers,
    )


def _parts(
    traced: Traced, plan: Plan, dims: Dims, rank: int, deferred: Mapping[str, Deferred]
) -> tuple[InputPart, ...]:
    """How a rank of the mesh takes each input of the graph."""
    users = list(traced.arguments.paths)
    layouts = plan.program.inputs
    return tuple(
        InputPart(
            name=item.name,
            kind=item.kind,
            target=item.target,
            spec=item.spec,
            layout=layouts[item.name],
            part=dims.part(item.name, layouts[item.name], plan.mesh.coordinate(rank)),
            aliases=item.aliases,
            mutated=item.mutated,
            sync=deferred[item.name].key if item.name in deferred else None,
            gathers=deferred[item.name].gathers if item.name in deferred else (),
            position=users.index(item.target) if item.kind is InputKind.USER else -1,
        )
        for item in traced.graph.inputs
    )


def _gathered_once(program: Program) -> set[str]:
    return {name for name in program.gatherings if program.gathering(name) is Gathering.ONCE}


def _deferred_keys(deferred: Mapping[str, Deferred]) -> set[str]:
    """Every group key of what is done once a step."""
    keys = {str(gather.arguments[0]) for item in deferred.values() for gather in item.gathers}
    return keys | {item.key for item in deferred.values() if item.key is not None}


def _group_keys(graph: fx.Graph) -> set[str]:
    """Every group key that the program names."""
    arguments = (item for node in graph.nodes if node.op == "call_function" for item in node.args)
    return {item for item in arguments if isinstance(item, str) and "@" in item}
