"""Gradients that forward takes by `torch.autograd.grad`: autograd runs under the tracer, like forward.

    e = net(x)                           what autograd keeps is in the graph: operators by their parts, as
    f = grad(e.sum(), x, create_graph)   linear keeps the transposed weight, which is inside of it

Autograd gives a result that it has kept (tanh keeps its own) as another object, of the same node and place.
Without `create_graph` the operators of the gradient have none themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.torch_seams.autograd import pop_saved_hooks, push_saved_hooks, top_saved_hooks
from autopar.torch_seams.pytree import tree_leaves, tree_map_only
from autopar.torch_seams.tracing import proxy_call


class TakenGradients(TorchFunctionMode):
    """Within, `torch.autograd.grad` builds a graph if asked to; `found` says whether it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.autograd.grad:
            return function(*args, **kwargs)
        self.found = True
        with torch.set_grad_enabled(_creates_graph(args, kwargs)):
            return function(*args, **kwargs)


def _creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `autograd.grad` asks for gradients that have gradients themselves."""
    return bool(args[4] if len(args) > 4 else kwargs.get("create_graph"))


@contextmanager
def followed() -> Iterator[None]:
    """Context in which operators are traced by the parts that autograd sees, and what it has kept is known
    again."""
    traced = proxy_call.now
    made: dict[tuple[Any, int], Tensor] = {}

    def again(tensor: Tensor) -> Tensor:
        return made.get((tensor.grad_fn, tensor.output_nr), tensor) if tensor.grad_fn else tensor

    def call(mode: Any, function: Any, _pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, again, (args, kwargs))
        result = traced(mode, function, False, args, kwargs)
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                made[each.grad_fn, each.output_nr] = each
        return result

    with proxy_call.replaced(call), _kept_as_they_are():
        yield


@contextmanager
def _kept_as_they_are() -> Iterator[None]:
    """Context in which autograd keeps operands themselves: hooks around the call would give others back."""
    hooks = list[Any]()
    while (top := top_saved_hooks(True)) is not None:
        hooks.append(top)
        pop_saved_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_hooks(pack, unpack)
