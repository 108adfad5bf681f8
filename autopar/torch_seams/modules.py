"""What torch.nn.Module keeps of its parameters, buffers, children and hooks, in dictionaries of each module.

By these tensors are found and replaced past a module's `__getattr__` and `__setattr__`, which users override.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autopar.torch_seams.required import expect, required

Hooks = dict[int, Callable[..., Any]]

with required():
    own_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
    """A module's own parameters by name, to be read and replaced."""

    own_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
    """A module's own buffers by name, to be read and replaced."""

    own_children: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
    """A module's own children by name."""

    unsaved_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
    """The names of a module's own buffers that no state dict has."""

    pre_hooks_of: Callable[[nn.Module], Hooks] = attrgetter("_forward_pre_hooks")
    """A module's hooks before forward, among which are those that prune and normalize weights."""

    saving_hooks_of: Callable[[nn.Module], Hooks] = attrgetter("_state_dict_hooks")
    """A module's hooks after its state dict is made, whose order says which sees the full tensors."""

    add_saving_hook: Callable[[nn.Module, Callable[..., Any]], RemovableHandle] = (
        nn.Module._register_state_dict_hook
    )
    """Add a hook after a module's state dict is made, which may change it."""

    add_loading_hook: Callable[..., RemovableHandle] = nn.Module._register_load_state_dict_pre_hook
    """Add a hook before one module is loaded; the public one is called for the root alone."""

    apply_to_tensors: Callable[[nn.Module, Callable[[Tensor], Tensor]], nn.Module] = nn.Module._apply
    """Replace each tensor of a module and its children, as `double` does, by what a function makes of it."""

    BatchNorm = torch.nn.modules.batchnorm._BatchNorm
    """The base of batch norms of all dims."""

    DropoutNd = torch.nn.modules.dropout._DropoutNd
    """The base of dropouts of all dims."""

    HOOKS = {
        "_forward_hooks": "forward hook",
        "_forward_pre_hooks": "forward pre-hook",
        "_backward_hooks": "backward hook",
        "_backward_pre_hooks": "backward pre-hook",
    }
    """The attributes that hold a module's hooks of forward and backward, and what messages call these."""

    HOOKS_EVERYWHERE: tuple[Hooks, ...] = tuple(
        getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS
    )
    """The hooks of all modules."""

_bare = vars(nn.Module())
_KEPT = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", *HOOKS)
for _name in _KEPT:
    expect(_name in _bare, f"attribute {_name} of nn.Module")


def own_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters, and its own buffers, each by name."""
    return module._parameters, module._buffers


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of backward, which traces can't follow."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def pruned_name(hook: Any) -> str:
    """The name of the tensor that a hook of torch.nn.utils.prune prunes."""
    return str(hook._tensor_name)
