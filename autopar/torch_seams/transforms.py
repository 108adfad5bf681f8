"""What transforms a call beside autograd: torch.func, torch.jit.trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.torch_seams.replaced import Replaceable
from autopar.torch_seams.required import expect, required

with required():
    from torch._functorch import eager_transforms, vmap
    from torch.autograd import forward_ad

    expect(isinstance(forward_ad._current_level, int), "torch.autograd.forward_ad._current_level", "a number")

    jit_tracing: Callable[[], Any] = torch._C._get_tracing_state
    """What torch.jit.trace traces with; None where it doesn't."""

    innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
    """The innermost of torch.func's transforms that run; None where none does."""

    ENTRIES = (
        Replaceable(eager_transforms, "grad_increment_nesting"),
        Replaceable(eager_transforms, "jvp_increment_nesting"),
        Replaceable(vmap, "vmap_increment_nesting"),
    )
    """What each transform of torch.func begins with."""


def is_forward_mode() -> bool:
    """Whether a level of forward-mode derivatives is open, whose tangents programs don't carry."""
    return forward_ad._current_level >= 0
