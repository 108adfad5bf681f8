"""Programs under autocast beside eager code under it: their dtypes, and their losses.

    kernels   each kernel that eager code runs gives what dtypes; so must the graph's, kernel by kernel
    losses    |parallel - serial|, beside |serial - serial whose weights are rounded otherwise|: the spread

The split itself is proved in float64. In low precision no two orders of sums agree, so that the spread is all
that can be asked for there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.core.graph import Graph, InputKind, eager_target, map_refs
from autopar.core.program import Program
from autopar.proof.precision import copy_model
from autopar.proof.verify import MOMENTUM, RATE, backward, seed, simulate_training
from autopar.sharding.strategies import dims_of
from autopar.trace.autocast import Autocast, KernelLog
from autopar.trace.call_signature import LossFunction, find_loss, flatten_results, split_for_loss
from autopar.trace.export import Traced
from autopar.trace.simplify import with_masks_by_dims

RERUNS = 3  # of serial training, each with weights rounded otherwise
SPREADS = 2.0  # times as far from the serial losses as these reruns may the parallel program's be


@dataclass(frozen=True, slots=True)
class LowPrecision:
    """What eager code under autocast and the program have in common.

    `kernels` were compared; `different` are those that give other dtypes. `loss` is the largest relative
    difference from the serial losses, `spread` that of serial reruns; None where losses weren't compared.
    """

    dtype: str
    kernels: int
    different: tuple[str, ...]
    loss: float | None = None
    spread: float | None = None

    @property
    def passed(self) -> bool:
        """Whether all dtypes agree, and losses as far as those of serial reruns."""
        near = self.loss is None or self.spread is None or self.loss <= SPREADS * self.spread
        return not self.different and near

    def as_dict(self) -> dict[str, Any]:
        """As the command line's JSON shows it."""
        return {
            "dtype": self.dtype,
            "kernels": self.kernels,
            "different_dtypes": list(self.different),
            "loss_error": self.loss,
            "loss_spread": self.spread,
        }

    def __str__(self) -> str:
        alike = f"OTHER dtypes: {', '.join(self.different)}" if self.different else "dtypes as under autocast"
        losses = (
            ""
            if self.loss is None
            else f"; losses differ by {self.loss:.1e}, serial reruns by {self.spread:.1e}"
        )
        return f"{self.dtype:<11} {self.kernels} kernels, {alike}{losses}"


def compare_low_precision(
    model: nn.Module,
    traced: Traced,
    program: Program | None,
    autocast: Autocast,
    *,
    loss_fn: LossFunction | None,
    steps: int,
) -> LowPrecision | None:
    """Eager training under `autocast` beside the graph, and beside `program` on simulated ranks; None where
    nothing is cast, or the device isn't there."""
    if autocast.dtype is None or any(item.device.type != autocast.device for item in model.parameters()):
        return None
    theirs, ours = _eager_kernels(model, traced, loss_fn, autocast), _graph_kernels(model, traced)
    dtype, different = str(autocast.dtype).removeprefix("torch."), tuple(_different(theirs, ours))
    count = sum(ours.values())
    if program is None or traced.graph.loss is None:
        return LowPrecision(dtype, count, different)
    serial = _serial_losses(copy_model(model), traced, loss_fn, autocast, steps)
    reruns = [
        _serial_losses(_rounded(model, number, autocast.dtype), traced, loss_fn, autocast, steps)
        for number in range(RERUNS)
    ]
    parallel = _parallel_losses(model, traced, program, steps)
    return LowPrecision(
        dtype, count, different, _gap(parallel, serial), max(_gap(rerun, serial) for rerun in reruns)
    )


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
    return Counter((str(call[0]._schema.name).rstrip("_"), call[2]) for call in log.calls)


def _eager_kernels(
    model: nn.Module, traced: Traced, loss_fn: LossFunction | None, autocast: Autocast
) -> Counter[tuple[str, Any]]:
    with torch.no_grad(), KernelLog(real=True) as log:
        _call(copy_model(model), traced, loss_fn, autocast)
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


def _call(model: nn.Module, traced: Traced, loss_fn: LossFunction | None, autocast: Autocast) -> Any:
    """What the eager model gives under autocast, or its loss."""
    args, kwargs = traced.arguments.rebuild(tuple(map(_fresh, traced.arguments.tensors)))
    args, kwargs, loss_args, loss_kwargs = split_for_loss(model, loss_fn, args, kwargs)
    with torch.autocast(autocast.device, autocast.dtype):
        output = model(*args, **kwargs)
        return loss_fn(output, *loss_args, **loss_kwargs) if loss_fn else output


def _serial_losses(
    model: nn.Module, traced: Traced, loss_fn: LossFunction | None, autocast: Autocast, steps: int
) -> Tensor:
    learned = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=RATE, momentum=MOMENTUM) if learned else None
    losses = []
    for step in range(steps):
        torch.manual_seed(seed(step))
        model.zero_grad()
        output = _call(model, traced, loss_fn, autocast)
        loss = find_loss(output)
        assert loss is not None
        backward(loss, flatten_results(output)[0])
        losses.append(loss.detach().double())
        if optimizer:
            optimizer.step()
    return torch.stack(losses)


def _parallel_losses(model: nn.Module, traced: Traced, program: Program, steps: int) -> Tensor:
    graph: Graph = with_masks_by_dims(traced.graph)
    dims = dims_of(graph, program.mesh)
    record = simulate_training(
        copy_model(model), traced.arguments, graph, program, dims, steps=steps, lift=_fresh
    )
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
