"""What two sides computed, compared tensor by tensor, and whether their difference is one of rounding.

The error of a kind is

    max |a - b| / max(max |b|, 1e-3 x the largest magnitude among tensors of that kind)

taken tensor by tensor: some true gradients are 0 (a key's bias), and need the floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.proof.precision import (
    copy_model,
    widest,
)
from autopar.trace.values.structure import parts_of

TOLERANCE = 1e-9


FLOOR = 1e-3


ROUNDINGS = 100  # errors of so many times what one rounding of the parameters does may be rounding


PROOF_SEED = 20_190_311  # every step draws its dropout masks from PROOF_SEED + step on both sides


KINDS = ("outputs", "loss", "gradients", "parameters", "buffers")


Tensors = dict[str, Tensor]


@dataclass(slots=True)
class Record:
    """Results of one side: an entry per step for outputs, loss and gradients.

    `casts` are those that were raised to float64 on the way.
    """

    outputs: Tensors = field(default_factory=dict)
    loss: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    casts: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The largest error of each kind, and the tensor that has it.

    Of a proof that failed `rounding` is the error of the serial model against itself, its parameters rounded
    otherwise.
    """

    max_error: dict[str, float]
    worst: str
    raised_casts: tuple[str, ...] = ()
    rounding: float | None = None

    @property
    def passed(self) -> bool:
        return all(error <= TOLERANCE for error in self.max_error.values())

    @property
    def is_rounding(self) -> bool:
        """Whether the errors may come from rounding alone, so that nothing is proved either way."""
        return self.rounding is not None and max(self.max_error.values()) <= ROUNDINGS * self.rounding


def judge(
    ours: Record,
    model: nn.Module,
    train: Callable[[nn.Module], Record],
    casts: tuple[str, ...],
    disagreement: Mapping[str, tuple[float, str]] | None = None,
    *,
    theirs: Record | None = None,
) -> Verdict:
    """The verdict on what the ranks computed, and on their disagreement among themselves.

    `train` makes of a serial model what they should have, unless that is known as `theirs`; the one given is
    changed. A verdict that fails also says what rounding does to it.
    """

    def comparable(record: Record) -> Record:  # a program of the loss alone has no other outputs
        return record if ours.outputs else replace(record, outputs={})

    theirs = comparable(train(copy_model(model)) if theirs is None else theirs)
    verdict = _worse(compare(ours, theirs, casts), disagreement or {})
    if verdict.passed or math.inf in verdict.max_error.values():
        return verdict
    try:
        rounded = comparable(train(_rounded(model)))
    except InputError:  # it trains to NaN
        return replace(verdict, rounding=math.inf)
    return replace(verdict, rounding=max(compare(rounded, theirs).max_error.values()))


def _rounded(model: nn.Module) -> nn.Module:
    """The model, every number that it learns moved in place to a neighbour, up or down at random."""
    generator = torch.Generator().manual_seed(PROOF_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            sides = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + sides.to(parameter) * torch.finfo(parameter.dtype).eps)
    return model


def _worse(verdict: Verdict, disagreement: Mapping[str, tuple[float, str]]) -> Verdict:
    """The verdict with the errors by which ranks differ from rank 0, where those are larger."""
    errors, worst = dict(verdict.max_error), verdict.worst
    for kind, (error, where) in disagreement.items():
        if error > max(errors.values(), default=0.0) or math.isinf(error):
            worst = where
        errors[kind] = max(errors[kind], error)
    return replace(verdict, max_error=errors, worst=worst)


def compare(ours: Record, theirs: Record, casts: tuple[str, ...] = ()) -> Verdict:
    """The errors of every kind; a tensor that only one side has is an infinite error."""
    state = ours.parameters | ours.buffers  # to a program a parameter that forward writes is a buffer
    learned = {name: state.pop(name) for name in theirs.parameters if name in state}
    ours = replace(ours, parameters=learned, buffers=state)
    errors: dict[str, float] = {}
    worst, name_of_worst = -1.0, "-"
    for kind in KINDS:
        mine: Tensors = getattr(ours, kind)
        wanted: Tensors = getattr(theirs, kind)
        floor = floor_of(wanted)
        errors[kind] = 0.0
        for name in wanted.keys() | mine.keys():
            found = difference(mine.get(name), wanted.get(name), floor)
            errors[kind] = max(errors[kind], found)
            if found > worst:
                worst, name_of_worst = found, f"{kind} {name}"
    return Verdict(errors, name_of_worst, (*casts, *theirs.casts))


def floor_of(wanted: Tensors) -> float:
    """The magnitude below which a tensor's errors count as if it had that magnitude."""
    return FLOOR * max((_magnitude(item) for item in wanted.values()), default=0.0)


def difference(mine: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    """The relative error of one tensor; infinite if one side lacks it."""
    if mine is None or wanted is None or mine.shape != wanted.shape:
        return float("inf")
    if mine.layout is not torch.strided:  # structure, which no step changes
        pairs = zip(parts_of(mine), parts_of(wanted), strict=True)
        return max(difference(one, other, floor) for one, other in pairs)
    if not wanted.numel():
        return 0.0
    a, b = widest(mine), widest(wanted)
    largest = _largest(a - b)
    if not math.isfinite(largest):  # NaN, or infinity, on both sides is no difference
        largest = _largest(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()))
    return float("inf") if largest != largest else largest / max(_magnitude(b), floor, 1e-300)


def _magnitude(tensor: Tensor) -> float:
    """The largest finite magnitude, 0 if there is none."""
    if tensor.layout is not torch.strided:
        return _magnitude(parts_of(tensor)[-1])
    values = widest(tensor)
    largest = _largest(values)
    return largest if math.isfinite(largest) else _largest(values[values.isfinite()])


def _largest(values: Tensor) -> float:
    """The largest magnitude, NaN if one is NaN: in one pass, without a copy."""
    return float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0
