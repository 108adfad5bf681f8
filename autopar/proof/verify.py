"""The parallel program against the eager serial model, in float64, over several optimizer steps.

Outputs, loss, all gradients, and afterwards parameters and buffers. The serial side is the user's
module itself, never the exported graph, so tracing is proved as well. verdict.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.core.graph import Graph, InputKind
from autopar.core.placement import Layout
from autopar.core.program import Program
from autopar.errors import AutoparError, CheckError, InputError
from autopar.proof.backward import backward as run_backward
from autopar.proof.precision import (
    copy_model,
    float64_by_default,
    raise_graph,
    raise_model,
    raise_tensor,
    raised_eager,
    written_constants,
)
from autopar.proof.ranks import assemble, distribute, meaning_for, run, seed_share, total_gradient
from autopar.proof.verdict import PROOF_SEED, Record, Tensors, Verdict, judge
from autopar.rewrite.overlap import overlap
from autopar.rewrite.rank_program import RankProgram, rewrite
from autopar.rewrite.recompute import recomputing
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of
from autopar.trace.call.call_signature import (
    Arguments,
    LossFunction,
    find_loss,
    flatten_results,
    split_for_loss,
)
from autopar.trace.call.user_source import user_line
from autopar.trace.export import Traced
from autopar.trace.micro_batches import MicroBatch, mask_seed
from autopar.trace.state.module_state import NewState
from autopar.updates.reference import train_stale

RATE, MOMENTUM = 0.01, 0.9
Call = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]  # the model's, the loss's


def verify_simulated(
    model: nn.Module,
    traced: Traced,
    program: Program,
    *,
    loss_fn: LossFunction | None,
    steps: int,
    theirs: Record | None = None,
    room: float = 0.0,
) -> Verdict:
    """Prove `program` for `traced` on simulated ranks; `theirs` is the eager training, if it is known.
    Gathers that fit into `room` bytes start early."""
    graph, casts = raise_graph(traced.graph)
    dims = dims_of(graph, program.mesh)
    serial_model = raise_model(copy_model(model))
    with float64_by_default():
        ours = simulate_training(serial_model, traced.arguments, graph, program, dims, steps=steps, room=room)
    constants = written_constants(traced.graph)
    return judge(
        ours,
        serial_model,
        lambda model: train_eagerly(model, traced.arguments, loss_fn, steps=steps, constants=constants),
        casts,
        theirs=theirs,
    )


# -- the serial side ------------------------------------------------------------------------------------


def train_eagerly(
    model: nn.Module,
    arguments: Arguments,
    loss_fn: LossFunction | None,
    *,
    steps: int,
    constants: Sequence[Tensor] = (),
) -> Record:
    """Train the eager model by SGD, in place; `constants` are those of its graph.

    Raises InputError for a loss or gradients that are not finite, which prove nothing.
    """
    record = Record()
    call = eager_call(model, arguments, arguments.tensors, loss_fn)

    def backward_of(step: int) -> None:
        torch.manual_seed(seed(step))
        with raised_eager(record.casts, constants):  # backward, too, runs what the model checkpoints
            with _running_in_float64():
                output, loss = run_eagerly(model, call, loss_fn)
            leaves, _ = flatten_results(output)
            note_outputs(record, leaves, loss, step)
            backward(loss, leaves)

    return _train(model, record, steps, backward_of)


def accumulate_eagerly(
    model: nn.Module,
    arguments: Arguments,
    batch: Sequence[MicroBatch],
    loss_fn: LossFunction | None,
    *,
    steps: int,
    constants: Sequence[Tensor] = (),
) -> Record:
    """Train the eager model by SGD, in place, each step's gradients added up over weighted micro-batches.

    Raises InputError as `train_eagerly` does.
    """
    record = Record()
    calls = [eager_call(model, arguments, micro.tensors, loss_fn) for micro in batch]

    def backward_of(step: int) -> None:
        total = torch.zeros((), dtype=torch.float64)
        for number, call in enumerate(calls):
            torch.manual_seed(seed(step, number))
            with raised_eager(record.casts, constants):
                with _running_in_float64():
                    _, loss = run_eagerly(model, call, loss_fn)
                assert loss is not None
                weight = batch[number].weight
                if weight:  # of a part in which nothing counts the loss is 0/0
                    backward(loss * weight, ())
                    total += weight * loss.detach()
        record.loss[f"{step}:loss"] = total

    return _train(model, record, steps, backward_of)


def train_stale_eagerly(
    model: nn.Module,
    arguments: Arguments,
    batch: Sequence[MicroBatch],
    loss_fn: LossFunction | None,
    *,
    steps: int,
    constants: Sequence[Tensor] = (),
) -> Record:
    """Train as `accumulate_eagerly` does, by the reference of stale gradients; masks are those of step 0."""
    record = Record()

    def loss_of(taken: nn.Module, _: int, step: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, micro in enumerate(batch):
            torch.manual_seed(seed(0, number))
            call = eager_call(taken, arguments, micro.tensors, loss_fn)
            with _running_in_float64():
                _, loss = run_eagerly(taken, call, loss_fn)
            assert loss is not None
            if micro.weight:
                total = total + micro.weight * loss
        return total

    def optimizer_of(tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(tensors), lr=RATE, momentum=MOMENTUM)

    newest = model
    with raised_eager(record.casts, constants):
        for step, (loss, newest) in enumerate(train_stale(model, steps, loss_of, optimizer_of)):
            record.loss[f"{step}:loss"] = loss
            note_gradients(record, newest, step)
            _check_finite(record, step)
    note_state(record, newest)
    return record


def _train(model: nn.Module, record: Record, steps: int, backward_of: Callable[[int], None]) -> Record:
    """Take steps of SGD after `backward_of` each, and note gradients and state."""
    learned = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=RATE, momentum=MOMENTUM) if learned else None
    made = NewState(model)
    for step in range(steps):
        model.zero_grad()
        backward_of(step)
        note_gradients(record, model, step)
        _check_finite(record, step)
        if optimizer:
            optimizer.step()
    made.restore()  # what programs make anew
    note_state(record, model)
    return record


def run_eagerly(model: nn.Module, call: Call, loss_fn: LossFunction | None) -> tuple[Any, Tensor | None]:
    """Output of the eager model for a call, and its loss, None if there is none."""
    args, kwargs, loss_args, loss_kwargs = call
    output = model(*args, **kwargs)
    return output, loss_fn(output, *loss_args, **loss_kwargs) if loss_fn else find_loss(output)


def _check_finite(record: Record, step: int) -> None:
    """Raise InputError for a loss or gradients of this step that are not finite."""
    wrong = [
        f"{kind} {name}"
        for kind, tensors in (("loss", record.loss), ("gradients", record.gradients))
        for name, tensor in tensors.items()
        if name.startswith(f"{step}:") and not tensor.isfinite().all()
    ]
    if wrong:
        raise InputError(
            where=f"serial training, step {step}",
            found=f"NaN or infinity in {wrong[0]}" + (f" and {len(wrong) - 1} more" if wrong[1:] else ""),
            wanted="finite numbers: what is not would equal anything as bad",
            remedy="check the example inputs, or verify fewer --steps if training diverges",
        )


@contextmanager
def _running_in_float64() -> Iterator[None]:
    """Raise InputError for a model with an operator that knows no float64."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as cause:  # a forward raises anything
        raise InputError(
            where=user_line(cause),
            found=f"{type(cause).__name__}: {cause}",
            wanted="a model that runs in float64, in which proofs are made",
            remedy="replace that operator for the proof: plans and training don't need it",
        ) from cause


def eager_call(
    model: nn.Module, arguments: Arguments, tensors: Sequence[Tensor], loss_fn: LossFunction | None
) -> Call:
    """The arguments of the model and those of its loss, in float64."""
    args, kwargs = arguments.rebuild(tuple(raise_tensor(tensor) for tensor in tensors))
    return split_for_loss(model, loss_fn, args, kwargs)


def seed(step: int, micro_batch: int = 0) -> int:
    """Seed of a micro-batch's random masks, the same on both sides."""
    return mask_seed(PROOF_SEED + step, micro_batch)


def note_gradients(record: Record, model: nn.Module, step: int) -> None:
    """All gradients of one step; zeros where a parameter has none."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            record.gradients[f"{step}:{name}"] = (
                torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
            )


def note_state(record: Record, model: nn.Module) -> None:
    """Parameters and buffers after the last step."""
    record.parameters = {name: item.detach().clone() for name, item in model.named_parameters()}
    record.buffers = {name: item.detach().clone() for name, item in model.named_buffers()}


def note_outputs(record: Record, leaves: Sequence[Tensor], loss: Tensor | None, step: int) -> None:
    """Outputs and loss of one step."""
    kept = [leaf for leaf in leaves if leaf is not loss]
    record.outputs |= {f"{step}:output {index}": leaf.detach().clone() for index, leaf in enumerate(kept)}
    if loss is not None:
        record.loss[f"{step}:loss"] = loss.detach().clone()


def seeds_of(loss: Tensor | None, leaves: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Gradients from which backward starts: of the loss, or a fixed random weighting of all outputs."""
    if loss is not None:
        return [(index, torch.ones_like(leaf)) for index, leaf in enumerate(leaves) if leaf is loss]
    generator = torch.Generator().manual_seed(PROOF_SEED)
    return [
        (index, torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype))
        for index, leaf in enumerate(leaves)
        if leaf.requires_grad
    ]


def backward(loss: Tensor | None, leaves: Sequence[Tensor]) -> None:
    """Backward from the loss, or from all outputs if there is none."""
    if loss is not None:
        if loss.requires_grad:
            run_backward([loss])
        return
    seeds = seeds_of(None, leaves)
    if seeds:
        run_backward([leaves[index] for index, _ in seeds], [seed for _, seed in seeds])


# -- the parallel side ----------------------------------------------------------------------------------


def simulate_training(
    model: nn.Module,
    arguments: Arguments,
    graph: Graph,
    program: Program,
    dims: Dims,
    *,
    steps: int,
    lift: Callable[[Tensor], Tensor] = raise_tensor,
    room: float = 0.0,
) -> Record:
    """Train by all ranks' programs, step by step as the serial side does.

    `model` gives the first parameters and is not changed. `lift` makes the tensors of the start; gathers that
    fit into `room` bytes start early.
    """
    written = [rewrite(graph, program, dims, rank=rank) for rank in range(dims.mesh.num_devices)]
    weights = {item.name: item.spec for item in graph.inputs if item.kind is InputKind.PARAMETER}

    def body(each: RankProgram) -> fx.Graph:
        if room <= 0:
            return each.graph
        return overlap(each.graph, weights, room=room, steps=each.steps, segments=program.recompute)

    programs = [recomputing(body(each), each, graph, program, name="Rank") for each in written]
    record = Record()
    full = start_tensors(model, arguments, graph, lift)
    names = {item.name: item for item in graph.inputs}
    learned = [
        name for name, item in names.items() if item.kind is InputKind.PARAMETER and full[name].requires_grad
    ]
    optimizer = (
        torch.optim.SGD([full[name] for name in learned], lr=RATE, momentum=MOMENTUM) if learned else None
    )
    for step in range(steps):
        torch.manual_seed(seed(step))
        locals_ = distribute(full, program.inputs, dims)
        for local, each in zip(locals_, written, strict=True):
            local.update(each.constants)
        outputs = run(programs, locals_, meaning=meaning_for(graph))
        count = len(graph.outputs)
        _check_replicas(outputs, graph)
        leaves = outputs[0][:count]
        place = graph.outputs.index(graph.loss) if graph.loss in graph.outputs else None
        loss = None if place is None else leaves[place]
        note_outputs(record, leaves, loss, step)
        _simulated_backward(outputs, place, leaves, seed_share(graph, len(outputs)))
        for name in learned:
            share = total_gradient(name, [local[name] for local in locals_], program.inputs[name], dims)
            full[name].grad = share
            record.gradients[f"{step}:{names[name].target}"] = share.clone()
        if optimizer:
            optimizer.step()
        _update_buffers(graph, program.inputs, dims, outputs, locals_, full)
    for name, item in names.items():
        if item.kind is InputKind.PARAMETER:
            record.parameters[item.target] = full[name].detach()
        elif item.kind is InputKind.BUFFER:
            record.buffers[item.target] = full[name].detach()
    return record


def start_tensors(
    model: nn.Module, arguments: Arguments, graph: Graph, lift: Callable[[Tensor], Tensor] = raise_tensor
) -> Tensors:
    """Every input of the graph, whole, as fresh leaves, in float64 by `raise_tensor`."""
    users = dict(zip(arguments.paths, arguments.tensors, strict=True))
    return start_state(model, graph, lift) | {
        item.name: lift(users[item.target]) for item in graph.inputs if item.kind is InputKind.USER
    }


def start_state(model: nn.Module, graph: Graph, lift: Callable[[Tensor], Tensor] = raise_tensor) -> Tensors:
    """Every input of the graph that is not the user's, whole, as fresh leaves."""
    state: Mapping[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    found: Tensors = {}
    for item in graph.inputs:
        match item.kind:
            case InputKind.USER:
                continue
            case InputKind.CONSTANT:
                assert item.value is not None
                found[item.name] = lift(item.value)
            case _:
                found[item.name] = lift(state[item.target])
    return found


def _check_replicas(outputs: Sequence[Sequence[Tensor]], graph: Graph) -> None:
    """Every rank returns the global values."""
    for index, name in enumerate(graph.outputs):
        for rank, local in enumerate(outputs):
            if not torch.allclose(local[index], outputs[0][index], rtol=1e-9, atol=1e-12, equal_nan=True):
                raise CheckError(
                    where=f"output {name} on rank {rank}",
                    found="a value that differs from rank 0's",
                    wanted="the global value on every rank",
                    remedy="report this model",
                )


def _simulated_backward(
    outputs: Sequence[Sequence[Tensor]], place: int | None, leaves: Sequence[Tensor], share: float
) -> None:
    loss = None if place is None else leaves[place]
    if loss is not None and not loss.requires_grad:
        return
    seeds = (
        [(place, torch.ones_like(loss))] if place is not None and loss is not None else seeds_of(None, leaves)
    )
    roots = [local[index] for local in outputs for index, _ in seeds]
    shares = [seed * share for _ in outputs for _, seed in seeds]
    if roots:
        run_backward(roots, shares)


def _update_buffers(
    graph: Graph,
    layouts: Mapping[str, Layout],
    dims: Dims,
    outputs: Sequence[Sequence[Tensor]],
    locals_: Sequence[Mapping[str, Tensor]],
    full: Tensors,
) -> None:
    count = len(graph.outputs)
    for place, (buffer, _) in enumerate(graph.writes):
        new = [local[count + place].detach() for local in outputs]
        full[buffer] = assemble(buffer, new, layouts[buffer], dims)
    for item in graph.inputs:
        if item.mutated:
            shares = [local[item.name] for local in locals_]
            full[item.name] = assemble(item.name, shares, layouts[item.name], dims)
