"""Autograd's engine, its nodes, and hooks of what it saves."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from autopar.torch_seams.replaced import Replaceable
from autopar.torch_seams.required import required

with required():
    graph_task: Callable[[], int] = torch._C._current_graph_task_id
    """The number of the backward that runs in this thread; -1 outside of one."""

    current_node: Callable[[], Any] = torch._C._current_autograd_node
    """The node of the graph that backward is at; None outside of one."""

    any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
    """Whether some argument is a tensor that requires a gradient; in C, as each collective asks it."""

    profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
    """Whether a profiler notes operators."""

    queue_callback: Callable[[Callable[[], None]], None]
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    """Have the engine call a function as the backward that runs now ends."""

    SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
    """The base of autograd.Function whose `apply` is the one of C."""

    FUNCTIONS_ARE_PYTHON = isinstance(getattr(torch.autograd.Function.apply, "__func__", None), FunctionType)
    """Whether Function.apply is Python, until torch 2.13; from 2.14 on C reads of the class what it calls."""

    set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
    """Turn gradients on or off past function modes, in `modes.without_functions`."""

    top_saved_hooks: Callable[[bool], tuple[Any, Any] | None]
    top_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    """The hooks that pack and unpack what is saved; True: also where they are ignored by a trace."""

    pop_saved_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
    """Take the top hooks of what is saved away."""

    push_saved_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
    """Put hooks of what is saved on top."""

    run_backward = Replaceable(torch.autograd, "_engine_run_backward")
    """The one way from Python into the engine."""
