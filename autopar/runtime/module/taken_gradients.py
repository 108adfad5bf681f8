"""Gradients that no optimizer's step has taken yet, which a save would lose.

    backward   backward   step     backward
    pending    pending    taken    pending      a step marks each gradient with its version

Written anew, a gradient has another version, or is another tensor without a mark. Zeros are nothing to lose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.parameters.parameters import local
from autopar.torch_seams.tensors import version_of

_MARK = "_autopar_taken"  # an attribute of a gradient


@contextmanager
def marking_taken(
    optimizers: Sequence[torch.optim.Optimizer], note: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within, steps of these optimizers mark the gradients that they take, and are noted."""

    def mark(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        note()
        for parameter in _parameters([optimizer]):
            if (gradient := parameter.grad) is not None:
                setattr(gradient, _MARK, _version(gradient))

    handles = [optimizer.register_step_post_hook(mark) for optimizer in optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def pending_gradient(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """The name of a parameter of theirs on this rank whose gradient they haven't taken; empty without one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in _parameters(optimizers):
        gradient = parameter.grad
        if gradient is None or getattr(gradient, _MARK, None) == _version(gradient):
            continue
        if bool(local(gradient).ne(0).any()):
            return names.get(id(parameter), "a parameter")
    return ""


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    return (item for each in optimizers for group in each.param_groups for item in group["params"])


def _version(gradient: Tensor) -> tuple[int, int, int]:
    """Another one after each write, into a DTensor or into its own rows."""
    mine = local(gradient)
    return version_of(gradient), mine.data_ptr(), version_of(mine)
