"""Answers that eager training would give to code that asks whether it is traced.

    torch.compiler.is_compiling(), is_exporting()    False; True for torch's own code
    transformers' is_fake_tensor(x)                  False
    is self.a the module self.b?                     as ever: torch.export's stand-ins for modules under
                                                     several names are left out

Libraries take another branch where they hear that they are exported: masks are written out, and `is_causal`
is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.fx.experimental import proxy_tensor

_QUESTIONS = ("is_compiling", "is_exporting")
_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_LIBRARIES = (("transformers.utils.import_utils", "is_fake_tensor"),)  # beside torch, who ask of tensors


@contextmanager
def as_eager() -> Iterator[None]:
    """Within, in a trace, user code hears that it isn't traced."""
    with ExitStack() as stack:
        for name, flag in zip(_QUESTIONS, _FLAGS, strict=True):
            own = _answer(getattr(torch.compiler, flag))
            stack.enter_context(patch.object(torch.compiler, name, own))
            stack.enter_context(patch.object(torch.compiler, flag, False))
        for library, name in _LIBRARIES:
            if (module := sys.modules.get(library)) is not None and hasattr(module, name):
                stack.enter_context(patch.object(module, name, _no))
        yield


@contextmanager
def modules_themselves() -> Iterator[None]:
    """Within, modules under several names are traced as the objects that they are."""
    with patch.object(proxy_tensor._ModuleStackTracer, "getattr", proxy_tensor.PythonKeyTracer.getattr):
        yield


def _answer(flag: bool) -> Callable[[], bool]:
    """Answers torch's own code by `flag`, everybody else with False."""

    def is_traced() -> bool:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name in _QUESTIONS:
            frame = frame.f_back  # torch's older names of the question
        return flag and str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"

    return is_traced


def _no(*_: Any) -> bool:
    return False
