"""Parameters that somebody still holds when others have taken their places: any use of them is refused.

    kept = model.head.weight;  parallelize(model, ...)      kept.norm(): an error, not last week's values
    with autopar.full(parallel) as model: kept = ...        the same, once it has ended

Of those that parallelize has replaced, traces know which parameter they were (trace/state/shared_memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.torch_seams.modes import without_subclass_functions
from autopar.trace.call.user_source import calling_line

_GETTERS: tuple[Any, ...] = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.requires_grad, Tensor.is_leaf)
_TELLING = {  # what is no use of values
    *(getter.__get__ for getter in _GETTERS),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.is_floating_point, Tensor.is_complex),
}


class OldParameter(nn.Parameter):
    """A parameter of no model any more; errors name its model, and what to use instead."""

    _autopar_told: tuple[str, str, str]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _TELLING:
            with without_subclass_functions():
                return function(*args, **(kwargs or {}))
        old = next((item for item in _flat((args, kwargs or {})) if isinstance(item, cls)), None)
        found, wanted, remedy = vars(old)["_autopar_told"]
        raise InputError(where=calling_line(), found=found, wanted=wanted, remedy=remedy)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{vars(self)['_autopar_told'][0]}>"


def _flat(value: Any) -> Iterator[Any]:
    """The leaves of arguments; a pytree would take an old parameter apart, which refuses."""
    match value:
        case list() | tuple():
            for item in value:
                yield from _flat(item)
        case dict():
            for item in value.values():
                yield from _flat(item)
        case _:
            yield value


def retire(parameter: Tensor, *, found: str, wanted: str, remedy: str) -> None:
    """Make any use of `parameter` raise InputError from now on; those of own classes are left alone."""
    if type(parameter) is nn.Parameter:
        vars(parameter)["_autopar_told"] = (found, wanted, remedy)
        parameter.__class__ = OldParameter


def replaced(parameter: Tensor, name: str) -> None:
    """Retire one of the serial model's."""
    retire(
        parameter,
        found=f"parameter {name} of the serial model, which parallelize has replaced",
        wanted="that of the parallel module",
        remedy=f"read {name} from the parallel module where it is used, or use it in forward or loss_fn",
    )


def ended(parameter: Tensor, name: str) -> None:
    """Retire one of a whole model whose time is over, and let its memory go."""
    with torch.no_grad():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    retire(
        parameter,
        found=f"parameter {name} of a whole model (autopar.full) that has ended",
        wanted="that of the parallel module",
        remedy="use it inside, and keep a copy, .detach().clone(), of what is needed later",
    )


@contextmanager
def usable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Make old parameters usable within: a trace takes them for the new ones."""
    old = [item for item in parameters if type(item) is OldParameter]
    for item in old:
        item.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for item in old:
            item.__class__ = OldParameter
