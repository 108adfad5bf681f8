"""What a plan notes of a step that trains nothing, or otherwise than was meant: eager training says it later,
by an error in backward, or by a loss that isn't a number; and of one in which a GPU waits: for its host, or
for exchanges that could start early."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from autopar.core.graph import Graph, InputKind
from autopar.cost.program.early import could_hide
from autopar.planning.asked.request import Request
from autopar.solve.stages.step import Step
from autopar.trace.forms.linear_loss import LINEAR_LOSS
from autopar.units import show_seconds

MUCH = 0.03  # of a step: less isn't worth a note


def training_notes(graph: Graph) -> Iterator[str]:
    """A note if no parameter would learn."""
    learns = any(item.kind is InputKind.PARAMETER and item.spec.requires_grad for item in graph.inputs)
    if not learns:
        yield "nothing to train: no parameter of the model that forward uses requires a gradient"
    elif graph.loss is not None and not graph.specs[graph.loss].requires_grad:
        yield "nothing to train: no parameter that learns reaches the loss"


def loss_notes(graph: Graph, request: Request) -> Iterator[str]:
    """A note where losses were to be in pieces, and none can be."""
    if request.in_pieces and all(item.target is not LINEAR_LOSS for item in graph.operators):
        yield (
            "--loss-pieces all: no loss is in pieces; that takes a cross-entropy of what a linear layer "
            "gives and nobody else reads"
        )


def overlap_notes(step: Step, request: Request) -> Iterator[str]:
    """A note where much of what a step without stages waits for would hide if it started early."""
    if request.overlap or request.pipeline_ranks > 1 or not request.training:
        return
    seconds = request.micro_batches * could_hide(step.solution.priced)
    if seconds >= MUCH * step.seconds:
        yield (
            f"about {show_seconds(seconds)} of the communication that a step waits for would hide behind "
            "compute if it started early: --overlap"
        )


def host_notes(step: Step, operators: int, micro_batches: int) -> Iterator[str]:
    """A note where a GPU waits for its host, with what would help."""
    if step.calls and step.seconds <= step.calls:
        larger = "micro-batches" if micro_batches > 1 else "batches"
        yield (
            f"the host is the limit: to call {operators} operators, forward and backward, takes it "
            f"{show_seconds(step.cost.calls)}, longer than their kernels: compile, or take larger {larger}"
        )


def weight_notes(model: nn.Module) -> tuple[str, ...]:
    """A note on weights that are no finite numbers: what they touch is none, either."""
    names = [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    if not names:
        return ()
    more = f" and {len(names) - 1} others hold" if len(names) > 1 else " holds"
    return (f"{names[0]}{more} NaN or infinite numbers before anything is trained",)


def _is_finite(weight: torch.Tensor) -> bool:
    """True if all numbers are; weights without values, as on the meta device, count as such."""
    if weight.is_meta or not weight.is_floating_point() or not weight.numel():
        return True
    if type(weight.data) is not torch.Tensor or weight.layout is not torch.strided:
        return True
    return all(bool(end.isfinite()) for end in weight.detach().aminmax())
