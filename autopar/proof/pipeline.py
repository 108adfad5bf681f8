"""Training by stages and micro-batches on simulated ranks: what a pipeline computes, in any schedule.

    micro-batch m      stage 0 -> stage 1 -> ... -> loss, weighted
                       stage 0 <- stage 1 <- ... <- 1

Stages are cut apart as on real ranks: each starts from detached tensors, and hands back the gradients
of what it was given. A tied weight has one copy for each stage that uses it; its gradient is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

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
from autopar.rewrite.rank_program import RankProgram, rewrite
from autopar.rewrite.recompute import recomputing
from autopar.rewrite.split_stages import StageProgram, one_stage, split
from autopar.rewrite.stage_borders import Crossing, MeshSide, crossings, messages, sent_nodes
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
    program: Program
    dims: Dims
    arrives: Sequence[Crossing] | None = None  # from a stage whose mesh or program is another


@dataclass(frozen=True, slots=True)
class PipelinedGraph:
    """The graph of the first micro-batch, whose loss is its only output, and how it is split; `shorter` is
    that of micro-batches which are a sample shorter. Where stages are unlike, `programs` are those of each,
    the first among them."""

    graph: Graph
    program: Program
    pipeline: Pipeline
    shorter: Graph | None = None
    programs: Sequence[Program] = ()


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
    graph, pipeline, shorter = split_graph.graph, split_graph.pipeline, split_graph.shorter
    programs = split_graph.programs or (split_graph.program,) * len(pipeline.starts)
    cuts = _cuts(graph, programs, pipeline)
    short_cuts = _cuts(shorter, programs, pipeline) if shorter else cuts
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
        stages = [_stage(each, taken) for each in cuts]
        short = [
            replace(stage, programs=each.programs, dims=each.dims, arrives=each.arrives)
            for stage, each in zip(stages, short_cuts, strict=True)
        ]
        total = torch.zeros((), dtype=torch.float64)
        for number, micro in enumerate(batch):
            users = _users(graph, paths, micro)
            made = short if micro.share < batch[0].share else stages
            loss = _micro_batch(made, users, micro.weight, seed(0 if stale else step, number))
            total += micro.weight * loss
        record.loss[f"{step}:loss"] = total
        for name in learned:
            gradient = _gradient(name, stages)
            full[name].grad = gradient
            record.gradients[f"{step}:{targets[name]}"] = gradient.clone()
        if optimizer:
            optimizer.step()
        _read_buffers(stages, graph, full)
    for item in graph.inputs:
        if item.kind is InputKind.PARAMETER:
            record.parameters[item.target] = full[item.name].detach()
        elif item.kind is InputKind.BUFFER:
            record.buffers[item.target] = full[item.name].detach()
    return record


def _copies(full: Tensors, names: Sequence[str]) -> Tensors:
    return {name: full[name].detach().clone().requires_grad_() for name in names}


def _cuts(graph: Graph, programs: Sequence[Program], pipeline: Pipeline) -> list[_SimulatedStage]:
    """All stages, without tensors. Those of one program hand each value on as it lies."""
    starts, alike = pipeline.starts, all(each is programs[0] for each in programs)
    known: dict[int, tuple[Dims, list[RankProgram]]] = {}
    for program in programs:
        if id(program) not in known:
            dims = dims_of(graph, program.mesh)
            ranks = range(dims.mesh.num_devices)
            known[id(program)] = dims, [rewrite(graph, program, dims, rank=rank) for rank in ranks]
    wholes = [known[id(program)] for program in programs]
    borders = [
        None if alike else crossings(graph, starts, cut, (one[0], other[0]))
        for cut, ((_, one), (_, other)) in enumerate(pairwise(wholes))
    ]
    found = []
    for number, (program, (dims, written)) in enumerate(zip(programs, wholes, strict=True)):
        leaving = borders[number] if number < len(borders) else None
        stages = [
            split(whole, graph, starts)[number]
            if leaving is None
            else one_stage(whole, graph, starts, number, sent_nodes(graph, starts, number, whole, leaving))
            for whole in written
        ]
        modules = [
            recomputing(mine.graph, whole, graph, program, name="Stage")
            for mine, whole in zip(stages, written, strict=True)
        ]
        found.append(
            _SimulatedStage(stages[0], modules, [], program, dims, borders[number - 1] if number else None)
        )
    return found


def _stage(cut: _SimulatedStage, full: Tensors) -> _SimulatedStage:
    layouts = {name: cut.program.inputs[name] for name in cut.any.inputs if name in full}
    return replace(cut, locals_=distribute(full, layouts, cut.dims))


def _arriving(stage: _SimulatedStage, before: _SimulatedStage, made: Values) -> Values:
    """The values that a stage's ranks receive of those that the stage before has made."""
    if stage.arrives is None:
        return made
    ranks = range(stage.dims.mesh.num_devices)
    found: list[list[Tensor]] = [[] for _ in ranks]
    for each in stage.arrives:
        target, source = MeshSide(stage.dims, each.target), MeshSide(before.dims, each.source)
        places = map(stage.dims.mesh.coordinate, ranks)
        shapes = [stage.dims.local_shape(each.name, each.target, place) for place in places]
        pieces = [torch.zeros(shape, dtype=made[0][each.sent].dtype) for shape in shapes]
        for item in messages(each.name, source, target):
            sent = item.sent.take(made[item.sender][each.sent])
            whole = torch.zeros_like(pieces[item.receiver])
            item.received.add(sent, whole)
            pieces[item.receiver] = pieces[item.receiver] + whole
        for mine, piece in zip(found, pieces, strict=True):
            mine.append(piece)
    return [tuple(mine) for mine in found]


def _users(graph: Graph, paths: Sequence[str], micro: MicroBatch) -> Tensors:
    named = dict(zip(paths, micro.tensors, strict=True))
    return {item.name: named[item.target] for item in graph.inputs if item.kind is InputKind.USER}


def _micro_batch(stages: Sequence[_SimulatedStage], users: Tensors, weight: float, number: int) -> Tensor:
    """Forward and backward of one micro-batch; its loss."""
    given: list[Values] = []
    made: list[Values] = []
    sent: list[Values] = []  # as it arrives
    for before, stage in zip((None, *stages), stages, strict=False):
        names, dims = [name for name in stage.any.inputs if name in users], stage.dims
        cut = distribute(users, {name: stage.program.inputs[name] for name in names}, dims)
        if before is not None:
            sent.append(_arriving(stage, before, made[-1]))
        received = [_leaves(values, stage.any) for values in (sent[-1] if sent else [()] * len(cut))]
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
    _backward(given, sent, [loss * (weight * seed_share(dims.graph, len(losses))) for loss in losses])
    return losses[0].detach()


def _leaves(values: tuple[Tensor, ...], stage: StageProgram) -> tuple[Tensor, ...]:
    return tuple(
        value.detach().requires_grad_(spec.requires_grad)
        for value, spec in zip(values, stage.received, strict=True)
    )


def _backward(given: Sequence[Values], arrived: Sequence[Values], losses: Sequence[Tensor]) -> None:
    roots = [loss for loss in losses if loss.requires_grad]
    if roots:
        backward(roots)
    for received, sent in zip(reversed(given[1:]), reversed(arrived), strict=True):
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


def _gradient(name: str, stages: Sequence[_SimulatedStage]) -> Tensor:
    """The sum over the copies; zeros if no stage uses it."""
    spec = stages[0].dims.graph.specs[name]
    total = torch.zeros(spec.shape, dtype=spec.dtype)
    for stage in stages:
        if name in stage.any.inputs:
            local = [state[name] for state in stage.locals_]
            total += total_gradient(name, local, stage.program.inputs[name], stage.dims)
    return total


def _read_buffers(stages: Sequence[_SimulatedStage], graph: Graph, full: Tensors) -> None:
    written = {buffer for buffer, _ in graph.writes} | {item.name for item in graph.inputs if item.mutated}
    for stage in stages:
        for name in written.intersection(stage.any.inputs):
            if name in stage.any.writes or _is_mutated(name, graph):
                local = [state[name] for state in stage.locals_]
                full[name] = assemble(name, local, stage.program.inputs[name], stage.dims)


def _is_mutated(name: str, graph: Graph) -> bool:
    return any(item.name == name and item.mutated for item in graph.inputs)
