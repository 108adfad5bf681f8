"""The same training on real processes: every rank loads the target again and runs its own program.

Rank 0 returns what it computed, gathered to full tensors. All ranks must have computed the same, so
each compares with rank 0's and tells by how much it differs: a replica that drifts on its own can
leave rank 0 untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.compiler import Compiler, graph_digest
from autopar.core.plan import Plan
from autopar.errors import CheckError
from autopar.planning import Request
from autopar.proof.precision import raise_graph, raise_tensor
from autopar.proof.verify import (
    KINDS,
    MOMENTUM,
    RATE,
    SEED,
    Record,
    Tensors,
    backward,
    difference,
    floor_of,
    note_outputs,
)
from autopar.rewrite.render import describe
from autopar.runtime import worker
from autopar.runtime.launch import run_function
from autopar.runtime.module import ParallelModule
from autopar.signature import find_loss, flatten_arguments, flatten_results
from autopar.target import Target, load_target
from autopar.trace import Traced, trace

Disagreement = dict[str, tuple[float, str]]  # kind -> the largest error, and which tensor on which rank


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is told: the target, the plan and the graph that it is for, first values."""

    source: str
    digest: str
    plan: Plan
    cluster: ClusterSpec
    tensors: tuple[Tensor, ...]
    state: Mapping[str, Tensor]
    steps: int


def train_on_processes(job: Job) -> tuple[Record, Disagreement]:
    """Rank 0's record, and how far the other ranks are from it; raises WorkerError."""
    results = run_function(train_rank, job.cluster.num_devices, job)
    record, _ = results[0]
    assert record is not None
    worst: Disagreement = {}
    for rank, (_, found) in enumerate(results):
        for kind, (error, name) in found.items():
            worst[kind] = max(worst.get(kind, (0.0, "-")), (error, f"{kind} {name} on rank {rank}"))
    return record, worst


def train_rank(job: Job) -> tuple[Record | None, Disagreement]:
    """One rank's part of the training."""
    worker.init(job.cluster.device_type)
    job.cluster.check_world(dist.get_world_size())
    target = load_target(job.source)
    _copy_state(job.state, target.model)
    traced = _raised(target, job)
    compiler = Compiler(
        job.cluster,
        Request(),
        target.loss_fn,
        loss_only=False,
        exact_random=True,
        plan=job.plan,
        traced=traced,
    )
    parallel = ParallelModule(target.model.double(), compiler, describe=describe, device=compiler.device())
    record = train(parallel, traced, job)
    found = disagreement(record, compiler.device())
    return (record if dist.get_rank() == 0 else None), found


def _copy_state(state: Mapping[str, Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(state[name])


def _raised(target: Target, job: Job) -> Traced:
    """The target's graph in float64, traced as the parent did: from the model as it is."""
    arguments = flatten_arguments(target.args, target.kwargs)
    args, kwargs = arguments.rebuild(job.tensors)
    traced = trace(target.model, args, kwargs, loss_fn=target.loss_fn, loss_only=False)
    if graph_digest(traced.graph) != job.digest:
        raise CheckError(
            where=f"rank {dist.get_rank()}",
            found="a model that traces differently here",
            wanted="the graph that the plan is for",
            remedy="let the function of the target build the same model at each call",
        )
    graph, _ = raise_graph(traced.graph)
    return replace(traced, graph=graph)


def train(parallel: ParallelModule, traced: Traced, job: Job) -> Record:
    """SGD on the parallel model; every rank gets the whole record."""
    record = Record()
    args, kwargs = traced.arguments.rebuild(tuple(raise_tensor(tensor) for tensor in job.tensors))
    parallel.prepare(*args, **kwargs)
    learned = [item for item in parallel.parameters() if item.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=RATE, momentum=MOMENTUM) if learned else None
    for step in range(job.steps):
        torch.manual_seed(SEED + step)
        parallel.zero_grad()
        output = parallel(*args, **kwargs)
        leaves, _ = flatten_results(output)
        loss = find_loss(output)
        note_outputs(record, leaves, loss, step)
        backward(loss, leaves)
        record.gradients |= {f"{step}:{name}": value for name, value in _gradients(parallel).items()}
        if optimizer:
            optimizer.step()
    record.parameters = _full(parallel, dict(parallel.named_parameters()))
    record.buffers = _full(parallel, dict(parallel.named_buffers()))
    return _on_cpu(record)


def _gradients(parallel: ParallelModule) -> Tensors:
    parameters = {name: item for name, item in parallel.named_parameters() if item.requires_grad}
    return _full(
        parallel,
        {
            name: torch.zeros_like(item) if item.grad is None else item.grad
            for name, item in parameters.items()
        },
    )


def _full(parallel: ParallelModule, tensors: Mapping[str, Any]) -> Tensors:
    return {name: parallel.gather(name, tensor.detach()).clone() for name, tensor in tensors.items()}


def _on_cpu(record: Record) -> Record:
    return Record(
        **{kind: {name: item.cpu() for name, item in getattr(record, kind).items()} for kind in KINDS}
    )


def disagreement(record: Record, device: torch.device) -> Disagreement:
    """By how much this rank's tensors differ from rank 0's: the worst of each kind; collective."""
    found: Disagreement = {}
    for kind in KINDS:
        mine: Tensors = getattr(record, kind)
        floor = floor_of(mine)
        for name, tensor in mine.items():
            first = tensor.to(device, copy=True).contiguous()
            dist.broadcast(first, src=0)
            found[kind] = max(found.get(kind, (0.0, "-")), (difference(tensor, first.cpu(), floor), name))
    return found
