"""Programs under autocast beside eager code under it: their dtypes, and their losses.

    kernels   each kernel that eager code runs gives what dtypes; so must the graph's, kernel by kernel
    losses    |parallel - serial|, beside |serial - serial whose sums run in another order|: the spread

The split itself is proved in float64. In low precision no two orders of sums agree, so that the spread is all
that can be asked for there; a loss that is itself in low precision may be off by one rounding. A rerun sums
in an order of its own, every other one in as many parts as there are ranks, whose sums are rounded, too
(`sum_order`). Where a model has kernels whose order can't be changed, weights are rounded otherwise instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.core.graph import Graph, InputKind, eager_target, map_refs
from autopar.proof.cutting import eager_parts
from autopar.proof.pipeline import PipelinedGraph, simulate_pipeline
from autopar.proof.precision import copy_model
from autopar.proof.sum_order import OtherOrder
from autopar.proof.verify import MOMENTUM, RATE, backward, seed, simulate_training
from autopar.results.plan.plan import Plan
from autopar.sharding.strategies import dims_of
from autopar.torch_seams.schemas import schema_of
from autopar.trace.call.call_signature import LossFunction, find_loss, flatten_results, split_for_loss
from autopar.trace.export import Traced
from autopar.trace.forms.simplify import with_masks_by_dims
from autopar.trace.forward.autocast import Autocast, KernelLog
from autopar.trace.micro_batches import MicroBatch, split_batch
from autopar.trace.target import Target

RERUNS = 6  # of serial training
SPREADS = 3.0  # times as far from the serial losses as these reruns may the parallel program's be
REORDERED, ROUNDED = "sums in another order", "weights rounded otherwise"


@dataclass(frozen=True, slots=True)
class Graphs:
    """Graphs of the whole batch, of the first micro-batch, and of shorter ones, if there are any."""

    whole: Traced
    first: Traced
    shorter: Traced | None


@dataclass(frozen=True, slots=True)
class LowPrecision:
    """Comparison of eager code under autocast with the program.

    `kernels` were compared; `different` are those that give other dtypes. `loss` is the largest relative
    difference from the serial losses, `spread` that of serial reruns with what is `changed` in them; None
    where losses weren't compared. `rounding` is the relative distance of two numbers of the loss's dtype.
    """

    dtype: str
    kernels: int
    different: tuple[str, ...]
    loss: float | None = None
    spread: float | None = None
    changed: str = REORDERED
    rounding: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all dtypes agree, and the loss differs by no more than serial reruns do, or by one
        rounding."""
        if self.loss is None or self.spread is None:
            return not self.different
        return not self.different and self.loss <= max(SPREADS * self.spread, self.rounding)

    def as_dict(self) -> dict[str, Any]:
        """The report as the command line's JSON shows it."""
        return {
            "dtype": self.dtype,
            "kernels": self.kernels,
            "different_dtypes": list(self.different),
            "loss_error": self.loss,
            "loss_spread": self.spread,
            "reruns": self.changed,
        }

    def __str__(self) -> str:
        alike = f"OTHER dtypes: {', '.join(self.different)}" if self.different else "dtypes as under autocast"
        losses = (
            ""
            if self.loss is None
            else f"; losses differ by {self.loss:.1e}, serial reruns with {self.changed} by {self.spread:.1e}"
        )
        if self.loss is not None and self.spread is not None and self.loss > SPREADS * self.spread:
            losses += f", one rounding of the loss is {self.rounding:.1e}"
        return f"{self.dtype:<11} {self.kernels} kernels, {alike}{losses}"


def program_in_low_precision(
    target: Target, traced: Traced, plan: Plan, autocast: Autocast, *, steps: int
) -> LowPrecision | None:
    """Compare a plan without stages, on simulated ranks, with eager code under autocast."""
    return compare_low_precision(
        target.model,
        traced,
        autocast,
        loss_fn=target.loss_fn,
        steps=steps,
        losses=partial(_program_losses, target.model, traced, plan, steps),
        ranks=plan.mesh.num_devices,
    )


def pipeline_in_low_precision(
    target: Target,
    graphs: Graphs,
    plan: Plan,
    autocast: Autocast,
    *,
    steps: int,
) -> LowPrecision | None:
    """Compare a plan with stages or micro-batches with eager code under autocast, cut into the same parts."""
    count = plan.pipeline.micro_batches
    find, tensors = target.model.get_buffer, graphs.whole.arguments.tensors
    batch = split_batch(graphs.first.cutting, tensors, count, find=find)
    parts = eager_parts(batch, graphs.first, graphs.shorter, target.model)
    return compare_low_precision(
        target.model,
        graphs.whole,
        autocast,
        loss_fn=target.loss_fn,
        steps=steps,
        losses=partial(_pipeline_losses, target.model, graphs, plan, batch, steps),
        batch=parts if count > 1 else None,
        ranks=max(plan.mesh.num_devices, count),
    )


def compare_low_precision(
    model: nn.Module,
    traced: Traced,
    autocast: Autocast,
    *,
    loss_fn: LossFunction | None,
    steps: int,
    losses: Callable[[], Tensor] | None = None,
    batch: Sequence[MicroBatch] | None = None,
    ranks: int = 2,
) -> LowPrecision | None:
    """Compare eager training under `autocast` with the graph of the whole batch, and with `losses`.

    These are a plan's, on so many ranks, whose steps take `batch` part by part.

    None where nothing is cast, or the device isn't there.
    """
    if autocast.dtype is None or any(item.device.type != autocast.device for item in model.parameters()):
        return None
    theirs, ours = _eager_kernels(model, traced, loss_fn, autocast), _graph_kernels(model, traced)
    dtype, different = str(autocast.dtype).removeprefix("torch."), tuple(_different(theirs, ours))
    count = sum(ours.values())
    if losses is None or traced.graph.loss is None:
        return LowPrecision(dtype, count, different)
    parts = batch or [MicroBatch(traced.arguments.tensors, 1.0)]

    def serially(model: nn.Module, mode: OtherOrder | None = None) -> Tensor:
        with mode or nullcontext():
            return _serial_losses(model, traced, loss_fn, autocast, parts, steps)

    serial = serially(copy_model(model))
    spread, changed = _spread(model, serial, serially, dtype=autocast.dtype, ranks=ranks)
    rounding = torch.finfo(traced.graph.specs[traced.graph.loss].dtype).eps
    return LowPrecision(dtype, count, different, _gap(losses(), serial), spread, changed, rounding)


def _spread(
    model: nn.Module, serial: Tensor, serially: Callable[..., Tensor], *, dtype: torch.dtype, ranks: int
) -> tuple[float, str]:
    """How far serial reruns are from the `serial` losses at most, and what is changed in them."""
    orders = [OtherOrder(number, parts=max(2, ranks) if number % 2 else 1) for number in range(RERUNS)]
    reruns = [serially(copy_model(model), order) for order in orders]
    changed = REORDERED
    if any(order.unchanged or not order.changed for order in orders):
        changed = ROUNDED
        reruns = [serially(_rounded(model, number, dtype)) for number in range(RERUNS)]
    return max(_gap(rerun, serial) for rerun in reruns), changed


# -- dtypes -------------------------------------------------------------------------------------


def _different(theirs: Counter[tuple[str, Any]], ours: Counter[tuple[str, Any]]) -> list[str]:
    """Kernels that both run as often, and that give other dtypes; a trace leaves out what nobody needs."""
    found = []
    for name in sorted({name for name, _ in theirs} & {name for name, _ in ours}):
        mine, others = (
            {key[1]: count for key, count in each.items() if key[0] == name} for each in (ours, theirs)
        )
        if sum(mine.values()) == sum(others.values()) and mine != others:
            found.append(name)
    return found


def _kernels(log: KernelLog) -> Counter[tuple[str, Any]]:
    """By name, in place or not, with the dtypes of the results."""
    return Counter((str(schema_of(call[0]).name).rstrip("_"), call[2]) for call in log.calls)


def _eager_kernels(
    model: nn.Module, traced: Traced, loss_fn: LossFunction | None, autocast: Autocast
) -> Counter[tuple[str, Any]]:
    with torch.no_grad(), KernelLog(real=True) as log:
        _call(copy_model(model), traced, loss_fn, autocast, traced.arguments.tensors)
    return _kernels(log)


def _graph_kernels(model: nn.Module, traced: Traced) -> Counter[tuple[str, Any]]:
    with torch.no_grad(), KernelLog() as log:
        _interpret(copy_model(model), traced)
    return _kernels(log)


def _interpret(model: nn.Module, traced: Traced) -> None:
    graph, values = traced.graph, _inputs(model, traced)
    for item in graph.operators:
        args, kwargs = map_refs((item.args, item.kwargs), lambda ref: values[ref.name])  # noqa: B023
        results = eager_target(item)(*args, **kwargs)
        results = results if isinstance(results, (tuple, list)) else (results,)
        values |= {name: value for name, value in zip(item.results, results, strict=True) if name}


def _inputs(model: nn.Module, traced: Traced) -> dict[str, Any]:
    state: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    users = dict(zip(traced.arguments.paths, traced.arguments.tensors, strict=True))
    return {
        item.name: users[item.target]
        if item.kind is InputKind.USER
        else item.value
        if item.value is not None
        else state[item.target]
        for item in traced.graph.inputs
    }


# -- losses -------------------------------------------------------------------------------------


def _call(
    model: nn.Module,
    traced: Traced,
    loss_fn: LossFunction | None,
    autocast: Autocast,
    tensors: Sequence[Tensor],
) -> Any:
    """Output of the eager model under autocast, or its loss."""
    args, kwargs = traced.arguments.rebuild(tuple(map(_fresh, tensors)))
    args, kwargs, loss_args, loss_kwargs = split_for_loss(model, loss_fn, args, kwargs)
    with torch.autocast(autocast.device, autocast.dtype):
        output = model(*args, **kwargs)
        return loss_fn(output, *loss_args, **loss_kwargs) if loss_fn else output


def _serial_losses(
    model: nn.Module,
    traced: Traced,
    loss_fn: LossFunction | None,
    autocast: Autocast,
    batch: Sequence[MicroBatch],
    steps: int,
) -> Tensor:
    learned = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=RATE, momentum=MOMENTUM) if learned else None
    losses = []
    for step in range(steps):
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number, micro in enumerate(batch):
            torch.manual_seed(seed(step, number))
            output = _call(model, traced, loss_fn, autocast, micro.tensors)
            loss = find_loss(output)
            assert loss is not None
            if micro.weight:  # of a part in which nothing counts the loss is 0/0
                backward(loss * micro.weight, flatten_results(output)[0])
                total += micro.weight * loss.detach().double().cpu()
        losses.append(total)
        if optimizer:
            optimizer.step()
    return torch.stack(losses)


def _program_losses(model: nn.Module, traced: Traced, plan: Plan, steps: int) -> Tensor:
    """The losses of a plan without stages, on simulated ranks."""
    graph: Graph = with_masks_by_dims(traced.graph)
    dims = dims_of(graph, plan.mesh)
    record = simulate_training(
        copy_model(model), traced.arguments, graph, plan.program, dims, steps=steps, lift=_fresh
    )
    return torch.stack([loss.detach().double() for loss in record.loss.values()])


def _pipeline_losses(
    model: nn.Module, graphs: Graphs, plan: Plan, batch: Sequence[MicroBatch], steps: int
) -> Tensor:
    """Losses of a plan with stages or micro-batches."""
    graph, shorter = with_masks_by_dims(graphs.first.graph), graphs.shorter
    shorter_graph = with_masks_by_dims(shorter.graph) if shorter else None
    split_graph = PipelinedGraph(graph, plan.program, plan.pipeline, shorter_graph, plan.programs)
    paths = graphs.first.arguments.paths
    record = simulate_pipeline(copy_model(model), batch, paths, split_graph, steps=steps, lift=_fresh)
    return torch.stack([loss.detach().double() for loss in record.loss.values()])


def _rounded(model: nn.Module, number: int, dtype: torch.dtype) -> nn.Module:
    """A copy whose weights are moved by half of what `dtype` tells apart, up or down at random."""
    model, generator = copy_model(model), torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                sides = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + sides.to(parameter) * torch.finfo(dtype).eps / 2)
    return model


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).abs() / theirs.abs().clamp_min(1e-3)).max())


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
