"""What an optimizer keeps beside each weight, which counts in the memory of a plan.

    states = bytes of its state / bytes of the weight        SGD 0, with momentum 1, Adam and AdamW 2

Those named here are known. Any other is measured: it takes one step on two small weights, and what it
then keeps must be in proportion to them. State that isn't (Adafactor's rows and columns) has no such size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import InputError

Factory: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]
OptimizerLike: TypeAlias = str | type[Optimizer] | Factory | Optimizer

RATE = 1e-3  # of learning: so low that the numbers stay finite whatever the model
KNOWN: Mapping[str, Factory] = {
    "sgd": partial(torch.optim.SGD, lr=RATE),
    "sgd-momentum": partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=RATE),
    "adamw": partial(torch.optim.AdamW, lr=RATE),
}
STATES: Mapping[str, float] = {"sgd": 0.0, "sgd-momentum": 1.0, "adam": 2.0, "adamw": 2.0}
SHAPES = ((8, 16), (32, 64))  # of the weights that are tried
_KERNELS = ("foreach", "fused", "capturable")  # options of how a step runs, which keep nothing more


def states_of(optimizer: OptimizerLike) -> float:
    """Bytes of state for each byte of a weight.

    `optimizer` is a name of `KNOWN`, a class whose other arguments have defaults, a function of parameters
    that makes one, or one that is made already, of whose parameter groups the largest counts. Raises
    InputError for what can't be made or has no such size.
    """
    match optimizer:
        case str():
            if optimizer not in STATES:
                raise _wrong(repr(optimizer), ", ".join(STATES))
            return STATES[optimizer]
        case Optimizer():
            return max(
                _measure(_as_made(optimizer, group), _name(optimizer)) for group in optimizer.param_groups
            )
        case _ if callable(optimizer):
            return _measure(optimizer, _name(optimizer))
        case _:
            raise _wrong(repr(optimizer), "a name, a class, a function of parameters or an optimizer")


def _as_made(optimizer: Optimizer, group: Mapping[str, Any]) -> Factory:
    """What makes another optimizer like this group of a given one."""
    accepted = inspect.signature(type(optimizer)).parameters.keys() - {"params", *_KERNELS}
    return partial(type(optimizer), **{name: value for name, value in group.items() if name in accepted})


def _measure(make: Factory, name: str) -> float:
    first, second = (_bytes(make, name, shape) for shape in SHAPES)
    if first != second:
        raise _wrong(
            f"{name}, which keeps {first:g} times as much as a weight of {SHAPES[0]}, {second:g} times "
            f"as much as one of {SHAPES[1]}",
            "an optimizer whose state is in proportion to the weights",
        )
    return first


def _bytes(make: Factory, name: str, shape: tuple[int, ...]) -> float:
    """Bytes of state after a step on a weight of this shape, by the weight's own; single numbers, such as
    the count of steps, are left out."""
    weight = torch.nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    try:
        optimizer = make([weight])
        optimizer.step()
        kept = optimizer.state[weight].values()
    except Exception as cause:  # the user's own class or function may raise anything
        raise _wrong(
            f"{name}, which raises {type(cause).__name__}: {cause}", "one that takes a step"
        ) from cause
    tensors = (item for item in kept if isinstance(item, Tensor) and item.numel() > 1)
    return sum(item.numel() * item.element_size() for item in tensors) / weight.nbytes


def _name(optimizer: object) -> str:
    inner = optimizer.func if isinstance(optimizer, partial) else optimizer
    named = inner if callable(inner) and hasattr(inner, "__name__") else type(inner)
    return str(named.__name__)


def _wrong(found: str, wanted: str) -> InputError:
    return InputError(
        where="optimizer",
        found=found,
        wanted=wanted,
        remedy=f"name the one of {', '.join(STATES)} whose state is as large as yours, or larger",
    )
