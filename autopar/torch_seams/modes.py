"""What sees each operator or function that is called within, and what is past it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from autopar.torch_seams.required import required

with required():
    from torch.utils import _python_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    without_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
    """Within, no mode of dispatch or of tracing sees an operator: what is computed has values."""

    without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
    """Within, no function mode and no `__torch_function__` hears what is called."""

    without_subclass_functions: Callable[[], AbstractContextManager[None]]
    without_subclass_functions = torch._C.DisableTorchFunctionSubclass
    """Within, no tensor's class hears what is called: attributes of DTensors are read as fast as tensors'."""

    below_autograd: Callable[[], AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd
    """Within, an operator's kernel is called, past its derivative."""

    num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    """How many modes look on at operators below their derivatives, torch's own for traces among them."""

    without_any_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast
    """Within, nothing is cast on any device, whatever the state that Python reads."""

    default_torch_function: Any = torch._C._disabled_torch_function_impl
    """The `__torch_function__` of a class that has none of its own: it calls the function as torch does."""
