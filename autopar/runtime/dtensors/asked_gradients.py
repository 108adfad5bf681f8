"""Gradients of chosen parameters: `torch.autograd.grad(loss, parameters)`, `backward(inputs=parameters)`.

A program reads plain leaves that share the storage of parameters whose gradients are summed, or that lie in
parts; their gradients come to the parameters past autograd. So torch finds no way from a loss to such a
parameter, and gives None, or does nothing. That is refused by name; what the parameters are used in outside
the program, as in a penalty, has gradients as ever, and so have parameters that a program reads itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from autopar.errors import InputError
from autopar.torch_seams.autograd import run_backward
from autopar.trace.call.user_source import calling_line

_INPUTS = 3  # their place among what it takes after the outputs, behind gradients and two flags
_BEHIND = "_autopar_behind"  # the attribute of a leaf that holds its parameter
_leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def is_read_by_a_program(leaf: Tensor, parameter: Tensor) -> None:
    """Make autograd refuse gradients of the parameter behind this leaf from now on."""
    setattr(leaf, _BEHIND, parameter)
    _leaves[id(leaf)] = leaf
    run_backward.wrap(_guard)


def _guard(run: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if args[_INPUTS] and _has_behind(args[_INPUTS]) and _reaches_a_program(outputs):
            raise InputError(
                where=calling_line(),
                found="gradients of chosen parameters, by torch.autograd.grad or backward(inputs=...)",
                wanted="gradients of a parallel program, which come into .grad of all parameters that learn",
                remedy="call loss.backward() and read .grad, with requires_grad_(False) for the others",
            )
        return run(outputs, *args, **kwargs)

    return guarded


def _has_behind(inputs: Iterable[Any]) -> bool:
    """Whether one of the inputs is the parameter behind a leaf."""
    return not {*map(id, inputs)}.isdisjoint(id(getattr(leaf, _BEHIND)) for leaf in [*_leaves.values()])


def _reaches_a_program(outputs: Iterable[Any]) -> bool:
    """Whether a backward from the outputs ends in a leaf of a program."""
    waiting = [getattr(item, "grad_fn", None) or getattr(item, "node", None) for item in outputs]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if id(getattr(node, "variable", None)) in _leaves:
            return True
        following = {after for after, _ in node.next_functions} - seen
        seen |= following
        waiting += following
    return False
