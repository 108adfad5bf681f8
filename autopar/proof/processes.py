"""Trains on real processes: every rank loads the target again and runs its own program.

Rank 0 returns what it computed, gathered to full tensors. All ranks must have computed the same, so
each compares with rank 0's and tells by how much it differs: a replica that drifts on its own can
leave rank 0 untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.compiler import Compiler
from autopar.core.fingerprint import fingerprint_of
from autopar.core.graph import Graph, InputKind
from autopar.errors import CheckError
from autopar.planning.asked.request import Request
from autopar.planning.graphs.micro_batch_graphs import CallTraces, parts_of
from autopar.proof.precision import float64_by_default, raise_graph, raise_model, raise_tensor
from autopar.proof.verdict import KINDS, Record, Tensors, difference, floor_of
from autopar.proof.verify import MOMENTUM, RATE, backward, note_outputs, seed
from autopar.results.plan.plan import Plan
from autopar.rewrite.render import describe
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import run_function
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.module.stale_steps import StaleExchange, StaleSteps
from autopar.trace.call.call_signature import find_loss, flatten_arguments, flatten_results
from autopar.trace.export import Traced, trace
from autopar.trace.forward.autocast import Autocast
from autopar.trace.target import Target, load_target
from autopar.updates.rules import Stale

Disagreement = dict[str, tuple[float, str]]  # kind -> the largest error, and which tensor on which rank


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Job that every rank of a proof receives: target, plan, first values."""

    source: str
    plan: Plan
    cluster: ClusterSpec
    tensors: tuple[Tensor, ...]
    state: Mapping[str, Tensor]
    steps: int
    request: Request
    autocast: Autocast = Autocast()  # around the calls that are traced
    rule: Stale | None = None  # of updates

    @property
    def by_steps(self) -> bool:
        """Whether the plan is one for `train_step`."""
        return self.plan.pipeline.is_staged or self.plan.pipeline.micro_batches > 1


def train_on_processes(job: TrainingJob) -> tuple[Record, Disagreement]:
    """Rank 0's record, and how far the other ranks are from it; raises WorkerError."""
    results = run_function(train_rank, job.cluster.num_devices, job)
    record, _ = results[0]
    assert record is not None
    worst: Disagreement = {}
    for rank, (_, found) in enumerate(results):
        for kind, (error, name) in found.items():
            worst[kind] = max(worst.get(kind, (0.0, "-")), (error, f"{kind} {name} on rank {rank}"))
    return record, worst


def train_rank(job: TrainingJob) -> tuple[Record | None, Disagreement]:
    """One rank's part of the training."""
    worker.init(job.cluster.device_type)
    job.cluster.check_world(dist.get_world_size())
    parallel, traced = parallel_of(load_target(job.source), job)
    with float64_by_default():
        record = train(parallel, traced, job)
    found = disagreement(record, runner_of(parallel).device)
    return (record if dist.get_rank() == 0 else None), found


def parallel_of(target: Target, job: TrainingJob) -> tuple[ParallelModule, Traced]:
    """The target as a rank of its cluster runs it, in float64 and by the job's plan, and its graph."""
    _copy_state(job.state, target.model)
    traced, shorter = _raised(target, job)
    compiler = Compiler(
        job.cluster,
        Request(measure=False, memory=job.request.memory, overlap=job.request.overlap),
        target.loss_fn,
        loss_only=job.by_steps,
        exact_random=True,
        plan=job.plan,
        traced=traced,
        shorter=shorter,
    )
    parallel = ParallelModule(
        raise_model(target.model),
        compiler,
        describe=describe,
        device=compiler.device(),
        by_steps=job.by_steps,
        exact_random=True,
    )
    if job.request.compile:
        parallel.compile()
    return parallel, traced


def _copy_state(state: Mapping[str, Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(state[name])


def trace_lengths(
    target: Target, count: int, request: Request, autocast: Autocast
) -> tuple[Traced, Traced | None]:
    """The graph of the first of `count` micro-batches, with its loss alone, and that of shorter ones."""

    def whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        return trace(
            target.model,
            args,
            kwargs,
            loss_fn=target.loss_fn,
            static=request.static,
            autocast=autocast,
            in_pieces=request.in_pieces,
        )

    if count == 1:
        return whole(target.args, target.kwargs).loss_alone(), None
    parts = parts_of(CallTraces(whole), target.args, target.kwargs, request.batch_dims)
    return parts.traced(count), parts.traced(count, -1) if parts.size % count else None


def _raised(target: Target, job: TrainingJob) -> tuple[Traced, Traced | None]:
    """The target's graphs in float64, traced as the parent did: from the model as it is."""
    if job.by_steps:
        count = job.plan.pipeline.micro_batches
        traced, shorter = trace_lengths(target, count, job.request, job.autocast)
    else:
        args, kwargs = flatten_arguments(target.args, target.kwargs).rebuild(job.tensors)
        traced, shorter = _whole(target, args, kwargs, job), None
    difference = fingerprint_of(traced.graph).difference(job.plan.graph)
    if difference is not None:
        raise CheckError(
            where=f"rank {dist.get_rank()}: {difference.where} of the model",
            found=difference.here,
            wanted=f"{difference.planned}, for which the plan is",
            remedy="let the function of the target build the same model at each call",
        )
    return _raise(traced), _raise(shorter) if shorter else None


def _whole(target: Target, args: Any, kwargs: Any, job: TrainingJob) -> Traced:
    return trace(
        target.model,
        args,
        kwargs,
        loss_fn=target.loss_fn,
        loss_only=job.request.in_pieces,
        static=job.request.static,
        autocast=job.autocast,
        in_pieces=job.request.in_pieces,
    )


def _raise(traced: Traced) -> Traced:
    return replace(traced, graph=raise_graph(traced.graph)[0])


def train(parallel: ParallelModule, traced: Traced, job: TrainingJob) -> Record:
    """SGD on the parallel model; every rank gets the whole record."""
    record = Record()
    args, kwargs = traced.arguments.rebuild(tuple(raise_tensor(tensor) for tensor in job.tensors))
    parallel.prepare(*args, **kwargs)
    learned = [item for item in parallel.parameters() if item.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=RATE, momentum=MOMENTUM) if learned else None
    for step in _loop(parallel, (args, kwargs), job):
        torch.manual_seed(seed(0 if job.rule else step))
        parallel.zero_grad()
        if job.by_steps:
            record.loss[f"{step}:loss"] = parallel.train_step(*args, **kwargs).clone()
        else:
            output = parallel(*args, **kwargs)
            leaves, _ = flatten_results(output)
            loss = find_loss(output)
            note_outputs(record, leaves, loss, step)
            backward(loss, leaves)
        gradients = _gradients(parallel, traced.graph)
        record.gradients |= {f"{step}:{name}": value for name, value in gradients.items()}
        if optimizer:
            optimizer.step()
    held = {**dict(parallel.named_parameters()), **dict(parallel.named_buffers())}
    for kind, full in ((InputKind.PARAMETER, record.parameters), (InputKind.BUFFER, record.buffers)):
        names = [item.target for item in traced.graph.inputs if item.kind is kind]
        full |= _full(parallel, {name: held.get(name) for name in names})
    return _on_cpu(record)


def _loop(parallel: ParallelModule, batch: tuple[Any, Any], job: TrainingJob) -> Iterator[int]:
    """The steps of the training; of stale ones, as the loop that keeps the rule gives them."""
    if job.rule is None:
        yield from range(job.steps)
        return
    stale = runner_of(parallel).stale = StaleSteps(job.rule)
    with (exchange := StaleExchange(stale)).around(()):
        batches = iter([flatten_arguments(*batch)] * job.steps)
        yield from (step for step, _ in enumerate(exchange.ahead(batches, lambda: False)))


def _gradients(parallel: ParallelModule, graph: Graph) -> Tensors:
    held = dict(parallel.named_parameters())
    learned = [
        item.target for item in graph.inputs if item.kind is InputKind.PARAMETER and item.spec.requires_grad
    ]
    return _full(parallel, {name: _gradient(held.get(name)) for name in learned})


def _gradient(parameter: Tensor | None) -> Tensor | None:
    """Its gradient, zeros if it has none; None if the parameter is another stage's."""
    if parameter is None:
        return None
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _full(parallel: ParallelModule, tensors: Mapping[str, Tensor | None]) -> Tensors:
    return {
        name: parallel.gather(name, None if tensor is None else tensor.detach()).clone()
        for name, tensor in tensors.items()
    }


def _on_cpu(record: Record) -> Record:
    return Record(
        **{kind: {name: item.cpu() for name, item in getattr(record, kind).items()} for kind in KINDS}
    )


def disagreement(record: Record, device: torch.device) -> Disagreement:
    """Largest errors of this rank's tensors against rank 0's, by kind; a collective."""
    found: Disagreement = {}
    for kind in KINDS:
        mine: Tensors = getattr(record, kind)
        floor = floor_of(mine)
        for name, tensor in mine.items():
            first = tensor.to(device, copy=True).contiguous()
            dist.broadcast(first, src=0)
            found[kind] = max(found.get(kind, (0.0, "-")), (difference(tensor, first.cpu(), floor), name))
    return found
