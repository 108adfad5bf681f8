"""`autopar verify`: the plan of a target, proved against its eager serial model.

    trace -> plan -> rewrite in float64 -> train on all ranks --.
    eager model in float64 -> train ------------------------------> largest errors

The ranks are simulated in this process, or real ones. A proof that gathered everything proved
nothing, so one that is forced to a kind of parallelism also fails if the operators that have such a
factor don't use it for nearly all of their flops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.fingerprint import fingerprint_of
from autopar.core.force import Force, name_of
from autopar.core.graph import Graph
from autopar.core.loss_pieces import LossPieces
from autopar.core.outputs import Outputs
from autopar.errors import InputError
from autopar.planning.asked.ask import SearchMeans
from autopar.planning.asked.request import Request
from autopar.planning.graphs.fitting import as_planned
from autopar.planning.graphs.micro_batch_graphs import CallTraces, Said, parts_of
from autopar.planning.losses import has_pieces, search_form
from autopar.planning.unlike_meshes import find_unlike
from autopar.proof.changes import Changes, trace_whole, try_changes
from autopar.proof.cutting import cutting_effect, draws, eager_parts
from autopar.proof.low_precision import (
    Graphs,
    LowPrecision,
    pipeline_in_low_precision,
    program_in_low_precision,
)
from autopar.proof.pipeline import PipelinedGraph, simulate_pipeline
from autopar.proof.precision import (
    copy_model,
    float64_by_default,
    raise_graph,
    raise_model,
    raise_tensor,
    raised_eager,
    written_constants,
)
from autopar.proof.processes import Disagreement, TrainingJob, trace_lengths, train_on_processes
from autopar.proof.updates import UpdatesReport, prove_updates
from autopar.proof.verdict import TOLERANCE, Record, Verdict, judge
from autopar.proof.verify import (
    accumulate_eagerly,
    eager_call,
    run_eagerly,
    seed,
    train_eagerly,
    train_stale_eagerly,
    verify_simulated,
)
from autopar.results.files.text import html_of
from autopar.results.plan.plan import Plan
from autopar.rewrite.overlap import room_of
from autopar.rewrite.unequal_micro_batches import check_plan
from autopar.runtime.compiled.compiler import check_compiler
from autopar.runtime.programs.guards import Guard
from autopar.runtime.tree import serial_model
from autopar.trace.call.call_signature import Arguments, flatten_arguments
from autopar.trace.call.user_source import user_line
from autopar.trace.export import Traced, check_dense, trace
from autopar.trace.micro_batches import MicroBatch, split_batch
from autopar.trace.reads.attribute_reads import recording
from autopar.trace.rewrites.losses_in_pieces import with_losses_in_pieces
from autopar.trace.target import Target
from autopar.updates.rules import IslandRule, Stale
from costdb.database import Database

CASTS = 8  # that are named of those that were raised
FORCED_SHARE = 0.9  # of the flops of operators that have the forced factor


@dataclass(frozen=True, slots=True)
class MicroBatchEffect:
    """Effect of cutting the batch into `count` micro-batches on serial training, and its reason. It is
    `allowed` where the user asked for it and statistics that normalise samples are the reason."""

    verdict: Verdict
    count: int
    change: str | None
    allowed: bool

    def as_dict(self) -> dict[str, Any]:
        return {"max_error": self.verdict.max_error, "why": self.change, "allowed": self.allowed}

    def __str__(self) -> str:
        errors = self.verdict.max_error.items()
        largest = ", ".join(f"{name} by {error:.1e}" for name, error in errors if error > TOLERANCE)
        why = f": {self.change}" if self.change else ""
        return f"cutting     into {self.count} micro-batches alone changes {largest}{why}"


@dataclass(frozen=True, slots=True)
class Report:
    """A verdict on a plan; `force` are the kinds of parallelism that were asked for.

    `changes_tried` are changes of what forward reads, each with a step of its own.

    `low` is what is compared in low precision, beside the verdict in float64.
    With `cutting` the verdict is on serial training that is cut into the same micro-batches, and that differs
    from the uncut by this.
    """

    plan: Plan
    verdict: Verdict
    force: Force | None
    cutting: MicroBatchEffect | None = None
    changes_tried: Changes | None = None
    low: LowPrecision | None = None
    rule: str = ""  # of updates, whose reference serial training follows

    @property
    def vacuous(self) -> bool:
        """Whether the forced kind of parallelism ran too little of the work to prove anything."""
        return self.force is not None and self.plan.sharded_flops_share < FORCED_SHARE

    @property
    def changes(self) -> bool:
        """Whether cutting the batch changes numbers by itself."""
        return self.cutting is not None and not self.cutting.verdict.passed

    @property
    def passed(self) -> bool:
        agreed = not self.changes or (self.cutting is not None and self.cutting.allowed)
        follows = self.changes_tried is None or self.changes_tried.passed
        low = self.low is None or self.low.passed
        return self.verdict.passed and agreed and follows and low and not self.vacuous

    def as_dict(self) -> dict[str, Any]:
        """The report as the command line's JSON shows it."""
        return {
            "passed": self.passed,
            "max_error": self.verdict.max_error,
            "worst": self.verdict.worst,
            "vacuous": self.vacuous,
            "cutting": self.cutting.as_dict() if self.cutting is not None and self.changes else None,
            "state_changes": self.changes_tried.as_dict() if self.changes_tried is not None else None,
            "low_precision": self.low.as_dict() if self.low is not None else None,
            "sharded_flops_share": self.plan.sharded_flops_share,
            "gathered_ops": list(self.plan.gathered_ops),
            "raised_casts": list(self.verdict.raised_casts),
            "rounding_error": self.verdict.rounding,
            "status": self.plan.status,
            "cluster": self.plan.cluster,
            "mesh": self.plan.mesh_name,
            "updates": self.rule or None,
        }

    def __str__(self) -> str:
        kind = f"{name_of(self.force)} " if self.force else ""
        lines = [f"{name:<11} {error:.1e}" for name, error in self.verdict.max_error.items()]
        lines.append(f"worst       {self.verdict.worst}")
        lines.append(
            f"sharded     {self.plan.sharded_flops_share:.1%} of the {self.plan.split_unit} that "
            f"{kind}sharding could take"
        )
        if self.plan.gathered_ops:
            lines.append("gathered    " + ", ".join(self.plan.gathered_ops))
        if self.verdict.raised_casts:
            shown, rest = self.verdict.raised_casts[:CASTS], self.verdict.raised_casts[CASTS:]
            more = f" and {len(rest)} more" if rest else ""
            lines.append(f"raised to float64: {', '.join(shown)}{more}")
        verdict = "equals" if self.verdict.passed else "DIFFERS from"
        alike = " that is cut alike" if self.changes else f" by {self.rule}" if self.rule else ""
        lines.append(
            f"mesh {self.plan.mesh_name}: parallel training {verdict} serial training{alike} "
            f"({TOLERANCE:.0e} allowed)"
        )
        if self.low is not None:
            lines.append(str(self.low))
        if self.changes_tried is not None:
            lines.append(str(self.changes_tried))
        if self.changes:
            lines.append(str(self.cutting))
        if self.verdict.is_rounding:
            lines.append(
                f"unproved: serial training differs from itself by {self.verdict.rounding:.1e} if parameters "
                "are rounded otherwise; verify fewer --steps or, above all for a batch norm, more samples"
            )
        if self.vacuous:
            lines.append(f"vacuous: less than {FORCED_SHARE:.0%} of what could be sharded by {kind}was")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_of(self)


def check(
    target: Target,
    cluster: ClusterSpec,
    request: Request,
    *,
    steps: int,
    processes: bool = False,
    database: Database | None = None,
    plan: Plan | None = None,
    asked: bool = True,
    changes: int = 0,
    rule: Stale | None = None,
) -> Report:
    """Plan `target` as `request` says, and train it in parallel and serially for `steps` steps.

    `plan` is proved instead, if it is one of the target's graph. With `processes` on real processes of this
    machine, else on simulated ranks. Micro-batches that were `asked` for may have statistics of their own.
    Without stages and micro-batches so many `changes` of what forward reads are then tried, of each kind.
    Raises InputError for a model that cannot be run in parallel, and what
    planning raises.
    """
    check_input(
        target,
        cluster,
        steps=steps,
        processes=processes,
        micro_batches=request.micro_batches,
        batch_dims=request.batch_dims,
        static=request.static,
    )
    request = replace(request, outputs=Outputs.GLOBAL)  # ranks are compared in all outputs
    if request.pipeline_ranks > 1 or request.micro_batches > 1:
        return _check_pipeline(
            target,
            cluster,
            request,
            steps=steps,
            processes=processes,
            database=database,
            plan=plan,
            asked=asked,
            rule=rule,
        )
    autocast = request.autocast(cluster)
    with recording() as reads:
        traced = trace_whole(target, request, autocast)
    Guard(reads, own=target.model.modules())  # what training can't watch is refused here, too
    _check_loss(target, traced)
    plan = _plan(traced.graph, cluster, request, database, plan)
    traced, request = as_planned(traced, plan), _as_planned(request, plan)
    if processes:
        verdict = _verify_processes(target, traced, plan, cluster, request, steps)
    else:
        verdict = verify_simulated(
            target.model,
            traced,
            plan.program,
            loss_fn=target.loss_fn,
            steps=steps,
            room=room_of(request.cap(cluster), plan.peak_bytes) if request.overlap else 0.0,
        )
    tried = try_changes(target, plan, cluster, request, most=changes) if changes and verdict.passed else None
    low = program_in_low_precision(target, traced, plan, autocast, steps=steps)
    return Report(plan, verdict, request.force, changes_tried=tried, low=low)


def check_updates(
    target: Target,
    cluster: ClusterSpec,
    rule: IslandRule,
    islands: int,
    request: Request,
    island: ClusterSpec,
    *,
    steps: int,
    database: Database | None,
) -> UpdatesReport:
    """Plan an `island` of the cluster, and prove the rule on processes against its reference."""
    check_input(target, cluster, steps=steps, processes=True, micro_batches=request.micro_batches)
    request = replace(request, outputs=Outputs.GLOBAL)
    traced = trace_whole(target, request, request.autocast(island))
    _check_loss(target, traced)
    plan = _plan(traced.graph, island, request, database, None)
    traced, request = as_planned(traced, plan), _as_planned(request, plan)
    job = _job(target, traced, plan, island, request, steps)
    return prove_updates(target, job, rule, cluster, islands, traced.arguments)


def _check_pipeline(
    target: Target,
    cluster: ClusterSpec,
    request: Request,
    *,
    steps: int,
    processes: bool,
    database: Database | None,
    plan: Plan | None,
    asked: bool,
    rule: Stale | None,
) -> Report:
    """Check stages and micro-batches against the serial model that takes the batch at once; under a rule,
    against its reference."""
    arguments = flatten_arguments(target.args, target.kwargs)
    count = request.micro_batches
    autocast = request.autocast(cluster)
    with recording() as reads:
        traced, shorter = trace_lengths(target, count, request, autocast)
    Guard(reads, own=target.model.modules())  # what training can't watch is refused here, too
    plan = _plan(traced.graph, cluster, request, database, plan)
    traced, request = as_planned(traced, plan), _as_planned(request, plan)
    shorter = as_planned(shorter, plan) if shorter else None
    if shorter and (plan.pipeline.is_staged or not processes):
        for program in plan.all_programs:
            check_plan(program, traced.graph, shorter.graph)
    graph, casts = raise_graph(traced.graph)
    model = raise_model(copy_model(target.model))
    tensors = tuple(map(raise_tensor, arguments.tensors))
    batch = split_batch(traced.cutting, tensors, count, find=model.get_buffer)
    disagreement: Disagreement = {}
    if processes:
        job = _job(target, traced, plan, cluster, request, steps)
        ours, disagreement = train_on_processes(replace(job, rule=rule))
    else:
        shorter_graph = raise_graph(shorter.graph)[0] if shorter else None
        split_graph = PipelinedGraph(graph, plan.program, plan.pipeline, shorter_graph, plan.programs)
        with float64_by_default():
            ours = simulate_pipeline(
                model, batch, traced.arguments.paths, split_graph, steps=steps, stale=rule is not None
            )
    constants = written_constants(traced.graph)

    def at_once(model: nn.Module) -> Record:
        whole = [MicroBatch(tensors, 1.0)]
        return accumulate_eagerly(model, arguments, whole, target.loss_fn, steps=steps, constants=constants)

    def in_parts(model: nn.Module) -> Record:
        parts = eager_parts(batch, traced, shorter, model)
        return accumulate_eagerly(model, arguments, parts, target.loss_fn, steps=steps, constants=constants)

    def stale(model: nn.Module) -> Record:
        parts = eager_parts(batch, traced, shorter, model)
        return train_stale_eagerly(model, arguments, parts, target.loss_fn, steps=steps, constants=constants)

    if rule is not None:
        verdict = judge(ours, model, stale, casts, disagreement)
        return Report(plan, verdict, request.force, rule=str(rule))
    random = count > 1 and draws(graph)
    serially = in_parts if random else at_once
    verdict = judge(ours, copy_model(model), serially, casts, disagreement)
    whole, _ = trace_lengths(target, 1, request, autocast)
    graphs = Graphs(whole, traced, shorter)
    low = pipeline_in_low_precision(target, graphs, plan, autocast, steps=steps)
    if count == 1 or (verdict.passed and not random):
        return Report(plan, verdict, request.force, low=low)
    effect = cutting_effect(model, at_once, in_parts, random=random)
    if not random:
        verdict = judge(ours, model, in_parts, casts, disagreement)
    cutting = traced.cutting
    assert cutting is not None
    allowed = asked and cutting.by_statistics
    told = MicroBatchEffect(effect, count, cutting.change, allowed)
    return Report(plan, verdict, request.force, told, low=low)


def _plan(
    graph: Graph, cluster: ClusterSpec, request: Request, database: Database | None, plan: Plan | None
) -> Plan:
    """The plan that is there already, if it is one of this graph, or of it with losses in pieces; else the
    search's."""
    if plan is not None and plan.graph in (
        fingerprint_of(graph),
        fingerprint_of(with_losses_in_pieces(graph)),
    ):
        return plan
    request = replace(request, alternatives=False)
    if request.meshes:
        return find_unlike(graph, cluster, request, SearchMeans(database))
    return search_form(graph, cluster, request, SearchMeans(database)).plan


def _as_planned(request: Request, plan: Plan) -> Request:
    """The request for a plan's graph, whose losses may be in pieces by the planner's choice."""
    return replace(request, loss_pieces=LossPieces.ALL) if has_pieces(plan) else request


def check_compiled(request: Request, cluster: ClusterSpec, *, processes: bool) -> None:
    """Raise InputError for compiled programs on simulated ranks, or where nothing can be compiled."""
    if request.compile and not processes:
        raise InputError(
            where="--compile",
            found="simulated ranks, which run programs operator by operator",
            wanted="processes, on which programs are compiled whole",
            remedy="write --processes, or leave out --compile",
        )
    if request.compile:
        check_compiler(cluster.device_type)


def check_input(
    target: Target,
    cluster: ClusterSpec,
    *,
    steps: int,
    processes: bool,
    micro_batches: int,
    batch_dims: Said | None = None,
    static: Sequence[str] = (),
) -> None:
    """Raise InputError for what can't be proved, whatever its plan."""
    if steps < 1:
        raise InputError(where="--steps", found=str(steps), wanted="at least 1", remedy="write --steps 3")
    serial_model.check(target.model)
    check_dense(target.model)
    if any(parameter.is_meta for parameter in target.model.parameters()):
        raise InputError(
            where="model",
            found="parameters on the meta device",
            wanted="parameters with values, which a proof computes with",
            remedy="build the model on the CPU",
        )
    if processes:
        cluster.check_local()
    if micro_batches > 1:
        _check_micro_batches(target, micro_batches, batch_dims, static)


def _check_micro_batches(target: Target, count: int, said: Said | None, static: Sequence[str]) -> None:
    """Raise InputError for a micro-batch that the eager model, or its loss, can't run although it runs the
    whole batch; what is wrong with both is told where the model is traced and trained."""
    arguments = flatten_arguments(target.args, target.kwargs)

    def whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        return trace(target.model, args, kwargs, loss_fn=target.loss_fn, static=static)

    cutting = parts_of(CallTraces(whole), target.args, target.kwargs, said).cutting()
    batch = split_batch(cutting, arguments.tensors, count, weigh=False)
    model = raise_model(copy_model(target.model))
    causes = (_failure(target, model, arguments, micro.tensors, number) for number, micro in enumerate(batch))
    number, cause = next(((place, each) for place, each in enumerate(causes) if each is not None), (0, None))
    if cause is None or _failure(target, model, arguments, arguments.tensors) is not None:
        return
    total = cutting.size
    lengths = [round(micro.share * total) for micro in batch]
    raise InputError(
        where=f"micro-batch {number + 1} of {count}: {user_line(cause)}",
        found=f"{type(cause).__name__} with {lengths[number]} of {total} samples: {cause}",
        wanted=f"a serial model that runs {', '.join(map(str, lengths))} samples, as it runs all {total}",
        remedy="choose --micro-batches 1"
        + (f", or another that divides {total}" if total % count else "")
        + ", or let the model not depend on the size of the batch",
    ) from cause


def _failure(
    target: Target, model: nn.Module, arguments: Arguments, tensors: Sequence[Tensor], number: int = 0
) -> Exception | None:
    """The error that the eager `model`, or the loss, raises for micro-batch `number`; None if it raises
    none."""
    torch.manual_seed(seed(0, number))
    try:
        with raised_eager({}):
            run_eagerly(model, eager_call(model, arguments, tensors, target.loss_fn), target.loss_fn)
    except Exception as cause:  # a forward raises anything
        return cause
    return None


def _check_loss(target: Target, traced: Traced) -> None:
    if target.loss_fn is not None and traced.graph.loss is None:
        raise InputError(
            where=f"loss_fn {getattr(target.loss_fn, '__name__', type(target.loss_fn).__name__)}",
            found="a result that is no scalar tensor",
            wanted="one number, from which backward starts",
            remedy="return the mean or the sum of the losses alone",
        )


def _verify_processes(
    target: Target,
    traced: Traced,
    plan: Plan,
    cluster: ClusterSpec,
    request: Request,
    steps: int,
) -> Verdict:
    _, casts = raise_graph(traced.graph)
    job = _job(target, traced, plan, cluster, request, steps)
    ours, disagreement = train_on_processes(job)
    model = raise_model(copy_model(target.model))
    constants = written_constants(traced.graph)

    def serially(model: nn.Module) -> Record:
        return train_eagerly(model, traced.arguments, target.loss_fn, steps=steps, constants=constants)

    return judge(ours, model, serially, casts, disagreement)


def _job(
    target: Target,
    traced: Traced,
    plan: Plan,
    cluster: ClusterSpec,
    request: Request,
    steps: int,
) -> TrainingJob:
    model, tensors = target.model, flatten_arguments(target.args, target.kwargs).tensors
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return TrainingJob(
        source=target.source,
        plan=plan,
        cluster=cluster,
        tensors=tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors),
        state={name: tensor.detach() for name, tensor in state.items()},
        steps=steps,
        request=request,
        autocast=request.autocast(cluster),
    )
