"""Training by stages and micro-batches on simulated ranks: what a pipeline computes, in any schedule.

    micro-batch m      stage 0 -> stage 1 -> ... -> loss, weighted
                       stage 0 <- stage 1 <- ... <- 1

Stages are cut apart as on real ranks: each starts from detached tensors, and hands back the gradients
of what it was given. A tied weight has one copy for each stage that uses it; its gradient is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from autopar.core.graph import Graph, InputKind
from autopar.core.pipeline import Pipeline
from autopar.core.program import Program
from autopar.errors import CheckError
from autopar.proof.backward import backward
from autopar.proof.precision import raise_tensor
from autopar.proof.ranks import assemble, distribute, meaning_for, run, seed_share, total_gradient
from autopar.proof.verdict import Record, Tensors
from autopar.proof.verify import MOMENTUM, RATE, seed, start_state
from autopar.rewrite.rank_program import rewrite
from autopar.rewrite.recompute import recomputing
from autopar.rewrite.split_stages import StageProgram, split
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of
from autopar.trace.micro_batches import MicroBatch

Values = list[tuple[Tensor, ...]]  # of each rank


@dataclass(slots=True)
class _SimulatedStage:
    """A stage as the program of one rank says. Holds the programs of all ranks of its mesh with the parts
    that are recomputed, and their own copies of its inputs."""

    any: StageProgram
    programs: Sequence[fx.GraphModule]
    locals_: list[dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class PipelinedGraph:
    """The graph of the first micro-batch, whose loss is its only output, and how it is split; `shorter` is
    that of micro-batches which are a sample shorter."""

    graph: Graph
    program: Program
    pipeline: Pipeline
    shorter: Graph | None = None


def simulate_pipeline(
    model: nn.Module,
    batch: Sequence[MicroBatch],
    paths: Sequence[str],
    split_graph: PipelinedGraph,
    *,
    steps: int,
    lift: Callable[[Tensor], Tensor] = raise_tensor,
    stale: bool = False,
) -> Record:
    """SGD by the programs of all ranks of all stages; `lift` makes the first parameters of those of `model`.

    `batch` holds tensors as `lift` makes them, in the order of `paths`. Of `stale` steps gradients are those
    at the weights of the step before, and masks those of the first.
    """
    graph, program, pipeline = split_graph.graph, split_graph.program, split_graph.pipeline
    dims, shorter = dims_of(graph, program.mesh), split_graph.shorter
    cuts = _cuts(graph, program, pipeline, dims)
    rest = dims_of(shorter, dims.mesh) if shorter else dims
    short_cuts = _cuts(shorter, program, pipeline, rest) if shorter else cuts
    full = start_state(model, graph, lift)
    learned = [
        item.name
        for item in graph.inputs
        if item.kind is InputKind.PARAMETER and full[item.name].requires_grad
    ]
    optimizer = (
        torch.optim.SGD([full[name] for name in learned], lr=RATE, momentum=MOMENTUM) if learned else None
    )
    record, targets = Record(), {item.name: item.target for item in graph.inputs}
    before = _copies(full, learned)
    for step in range(steps):
        taken = full | before if stale else full
        before = _copies(full, learned)
        stages = [_stage(*each, taken, program, dims) for each in cuts]
        short = [replace(stage, programs=each) for stage, (_, each) in zip(stages, short_cuts, strict=True)]
        total = torch.zeros((), dtype=torch.float64)
        for number, micro in enumerate(batch):
            users = _users(graph, paths, micro)
            made, sizes = (short, rest) if micro.share < batch[0].share else (stages, dims)
            loss = _micro_batch(made, users, program, sizes, micro.weight, seed(0 if stale else step, number))
            total += micro.weight * loss
        record.loss[f"{step}:loss"] = total
        for name in learned:
            gradient = _gradient(name, stages, program, dims)
            full[name].grad = gradient
            record.gradients[f"{step}:{targets[name]}"] = gradient.clone()
        if optimizer:
            optimizer.step()
        _read_buffers(stages, graph, program, dims, full)
    for item in graph.inputs:
        if item.kind is InputKind.PARAMETER:
            record.parameters[item.target] = full[item.name].detach()
        elif item.kind is InputKind.BUFFER:
            record.buffers[item.target] = full[item.name].detach()
    return record


def _copies(full: Tensors, names: Sequence[str]) -> Tensors:
    return {name: full[name].detach().clone().requires_grad_() for name in names}


Cut = tuple[StageProgram, list[fx.GraphModule]]  # a stage, and the program of each rank of its mesh


def _cuts(graph: Graph, program: Program, pipeline: Pipeline, dims: Dims) -> list[Cut]:
    """All stages."""
    programs = [rewrite(graph, program, dims, rank=rank) for rank in range(dims.mesh.num_devices)]
    stages = zip(*(split(each, graph, pipeline.starts) for each in programs), strict=True)
    return [
        (
            stage[0],
            [
                recomputing(mine.graph, whole, graph, program, name="Stage")
                for mine, whole in zip(stage, programs, strict=True)
            ],
        )
        for stage in stages
    ]


def _stage(
    stage: StageProgram, programs: Sequence[fx.GraphModule], full: Tensors, program: Program, dims: Dims
) -> _SimulatedStage:
    layouts = {name: program.inputs[name] for name in stage.inputs if name in full}
    return _SimulatedStage(stage, programs, distribute(full, layouts, dims))


def _users(graph: Graph, paths: Sequence[str], micro: MicroBatch) -> Tensors:
    named = dict(zip(paths, micro.tensors, strict=True))
    return {item.name: named[item.target] for item in graph.inputs if item.kind is InputKind.USER}


def _micro_batch(
    stages: Sequence[_SimulatedStage],
    users: Tensors,
    program: Program,
    dims: Dims,
    weight: float,
    number: int,
) -> Tensor:
    """Forward and backward of one micro-batch; its loss."""
    given: list[Values] = []
    made: list[Values] = []
    for stage in stages:
        names = [name for name in stage.any.inputs if name in users]
        cut = distribute(users, {name: program.inputs[name] for name in names}, dims)
        received = [_leaves(values, stage.any) for values in (made[-1] if made else [()] * len(cut))]
        places = [node.name for node in stage.any.graph.nodes if node.op == "placeholder"]
        inputs = [
            dict(zip(places, mine, strict=False)) | state | batch
            for mine, state, batch in zip(received, stage.locals_, cut, strict=True)
        ]
        torch.manual_seed(number)
        results = run(stage.programs, inputs, meaning=meaning_for(dims.graph))
        given.append(received)
        made.append([tuple(values[: len(stage.any.sent)]) for values in results])
        _write_buffers(stage, results)
        losses = [values[len(stage.any.sent)] for values in results] if stage.any.outputs else []
    _check_replicas(losses)
    _backward(given, made, [loss * (weight * seed_share(dims.graph, len(losses))) for loss in losses])
    return losses[0].detach()


def _leaves(values: tuple[Tensor, ...], stage: StageProgram) -> tuple[Tensor, ...]:
    return tuple(
        value.detach().requires_grad_(spec.requires_grad)
        for value, spec in zip(values, stage.received, strict=True)
    )


def _backward(given: Sequence[Values], made: Sequence[Values], losses: Sequence[Tensor]) -> None:
    roots = [loss for loss in losses if loss.requires_grad]
    if roots:
        backward(roots)
    for received, sent in zip(reversed(given[1:]), reversed(made[:-1]), strict=True):
        pairs = [
            (value, leaf.grad)
            for values, leaves in zip(sent, received, strict=True)
            for value, leaf in zip(values, leaves, strict=True)
            if leaf.grad is not None and value.requires_grad
        ]
        if pairs:
            backward([value for value, _ in pairs], [grad for _, grad in pairs])


def _check_replicas(losses: Sequence[Tensor]) -> None:
    for rank, loss in enumerate(losses):
        if not torch.allclose(loss, losses[0], rtol=1e-9, atol=1e-12, equal_nan=True):
            raise CheckError(
                where=f"the loss on rank {rank} of the last stage",
                found="a value that differs from rank 0's",
                wanted="the global value on every rank",
                remedy="report this model",
            )


def _write_buffers(stage: _SimulatedStage, results: Sequence[tuple[Tensor, ...]]) -> None:
    """New values of the buffers that the program returns, for the next micro-batch."""
    for place, name in enumerate(stage.any.writes):
        offset = len(stage.any.sent) + len(stage.any.outputs) + place
        for state, values in zip(stage.locals_, results, strict=True):
            state[name] = values[offset].detach()


def _gradient(name: str, stages: Sequence[_SimulatedStage], program: Program, dims: Dims) -> Tensor:
    """The sum over the copies; zeros if no stage uses it."""
    spec = dims.graph.specs[name]
    total = torch.zeros(spec.shape, dtype=spec.dtype)
    for stage in stages:
        if name in stage.any.inputs:
            local = [state[name] for state in stage.locals_]
            total += total_gradient(name, local, program.inputs[name], dims)
    return total


def _read_buffers(
    stages: Sequence[_SimulatedStage], graph: Graph, program: Program, dims: Dims, full: Tensors
) -> None:
    written = {buffer for buffer, _ in graph.writes} | {item.name for item in graph.inputs if item.mutated}
    for stage in stages:
        for name in written.intersection(stage.any.inputs):
            if name in stage.any.writes or _is_mutated(name, graph):
                local = [state[name] for state in stage.locals_]
                full[name] = assemble(name, local, program.inputs[name], dims)


def _is_mutated(name: str, graph: Graph) -> bool:
    return any(item.name == name and item.mutated for item in graph.inputs)
