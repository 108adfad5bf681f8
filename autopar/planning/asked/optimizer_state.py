"""What an optimizer keeps beside each weight, which counts in the memory of a plan.

    bytes of its state = ratio * bytes of the weight + fixed        ratio: SGD 0, with momentum 1, Adam 2

Those named here are known. Any other is measured: it takes one step on two small weights, and what it
then keeps beside single numbers must be in proportion to them. State that isn't (Adafactor's rows and
columns) has no such size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.core.costs import OptimizerState, named_optimizer, wrong_optimizer
from autopar.errors import show_value

Factory: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]
OptimizerLike: TypeAlias = str | type[Optimizer] | Factory | Optimizer

RATE = 1e-3  # of learning: so low that the numbers stay finite whatever the model
KNOWN: Mapping[str, Factory] = {
    "sgd": partial(torch.optim.SGD, lr=RATE),
    "sgd-momentum": partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=RATE),
    "adamw": partial(torch.optim.AdamW, lr=RATE),
}
SHAPES = ((8, 16), (32, 64))  # of the weights that are tried
_KERNELS = ("foreach", "fused", "capturable")  # options of how a step runs, which keep nothing more


def state_of(optimizer: OptimizerLike) -> OptimizerState:
    """State sizes of an optimizer.

    `optimizer` is a name of `OPTIMIZERS`, a class whose other arguments have defaults, a function of
    parameters that makes one, or one that is made already, of whose parameter groups the largest state
    counts. Raises InputError for what can't be made or has no such size.
    """
    match optimizer:
        case str():
            return named_optimizer(optimizer)
        case Optimizer():
            name, groups = _name(optimizer), optimizer.param_groups
            found = [_measure(_as_made(optimizer, group), name) for group in groups]
            return OptimizerState(max(each.ratio for each in found), max(each.fixed for each in found))
        case _ if callable(optimizer):
            return _measure(optimizer, _name(optimizer))
        case _:
            raise wrong_optimizer(
                show_value(optimizer), "a name, a class, a function of parameters or an optimizer"
            )


def _as_made(optimizer: Optimizer, group: Mapping[str, Any]) -> Factory:
    """A factory of optimizers like this group of a given one."""
    accepted = inspect.signature(type(optimizer)).parameters.keys() - {"params", *_KERNELS}
    return partial(type(optimizer), **{name: value for name, value in group.items() if name in accepted})


def _measure(make: Factory, name: str) -> OptimizerState:
    first, second = (_state_of(make, name, shape) for shape in SHAPES)
    if first != second:
        raise wrong_optimizer(
            f"{name}, which keeps {first.ratio:g} times as much as a weight of {SHAPES[0]}, {second.ratio:g} "
            f"times as much as one of {SHAPES[1]}",
            "an optimizer whose state is in proportion to the weights",
        )
    return first


def _state_of(make: Factory, name: str, shape: tuple[int, ...]) -> OptimizerState:
    """State sizes of an optimizer after a step on a weight of this shape."""
    weight = torch.nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    try:
        optimizer = make([weight])
        optimizer.step()
        kept = optimizer.state[weight].values()
    except Exception as cause:  # the user's own class or function may raise anything
        raise wrong_optimizer(
            f"{name}, which raises {type(cause).__name__}: {cause}", "one that takes a step"
        ) from cause
    tensors = [item for item in kept if isinstance(item, Tensor)]
    large = sum(item.nbytes for item in tensors if item.numel() > 1)
    return OptimizerState(large / weight.nbytes, sum(item.nbytes for item in tensors if item.numel() == 1))


def _name(optimizer: object) -> str:
    inner = optimizer.func if isinstance(optimizer, partial) else optimizer
    named = inner if callable(inner) and hasattr(inner, "__name__") else type(inner)
    return str(named.__name__)
