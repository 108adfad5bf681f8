"""Answers that eager training would give to code that asks whether it is traced.

    torch.compiler.is_compiling(), is_exporting()    False; True for torch's own code
    transformers' is_fake_tensor(x)                  False
    type(x) is torch.Tensor                          True for what stands for a tensor
    is self.a the module self.b?                     as ever: torch.export's stand-ins for modules under
                                                     several names are left out

Libraries take another branch where they hear that they are exported: masks are written out, and `is_causal`
is lost. Where torch.export can't follow what they do otherwise, they hear it, and a plan notes that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor

_QUESTIONS = ("is_compiling", "is_exporting")
_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_TRACERS = {"torch", "autopar", "builtins", "numpy", "sympy", *sys.stdlib_module_names}  # that see stand-ins
_LIBRARIES = (("transformers.utils.import_utils", "is_fake_tensor"),)  # beside torch, who ask of tensors


NOTE = "forward asks whether it is traced, and hears yes: eager training may do otherwise; verify shows it"


class Answers:
    """What code hears in one trace, and whether any but torch's `asked`."""

    def __init__(self, *, eager: bool) -> None:
        self.eager, self.asked = eager, False

    def to_torch_alone(self, flag: bool) -> Callable[[], bool]:
        """Answers torch's own code by `flag`, everybody else as eager training would."""

        def is_traced() -> bool:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_name in _QUESTIONS:
                frame = frame.f_back  # torch's older names of the question
            is_torchs = str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"
            self.asked |= not is_torchs
            return flag and (is_torchs or not self.eager)

        return is_traced

    def of_tensors(self, own: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Answers a library's question about a tensor."""

        def is_fake(value: Any) -> bool:
            self.asked = True
            return own(value) and not self.eager

        return is_fake


@contextmanager
def heard(answers: Answers) -> Iterator[None]:
    """Within, in a trace, user code hears these answers."""
    with ExitStack() as stack:
        for name, flag in zip(_QUESTIONS, _FLAGS, strict=True):
            own = answers.to_torch_alone(getattr(torch.compiler, flag))
            stack.enter_context(patch.object(torch.compiler, name, own))
            if answers.eager:  # who has imported the function reads the flag
                stack.enter_context(patch.object(torch.compiler, flag, False))
        for library, name in _LIBRARIES:
            if (module := sys.modules.get(library)) is not None and hasattr(module, name):
                stack.enter_context(patch.object(module, name, answers.of_tensors(getattr(module, name))))
        stack.enter_context(_types_asked())
        yield


class _OfStandIns(type):
    """What `type` does, but for tensors of a trace."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kind = type(*args, **kwargs)
        if len(args) != 1 or not issubclass(kind, Tensor) or kind.__module__.partition(".")[0] != "torch":
            return kind
        return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class _Type(type, metaclass=_OfStandIns):
    """Stands in modules where Python's `type` would be found."""


@contextmanager
def _types_asked() -> Iterator[None]:
    """Within, modules of users and their libraries find `type` as eager training would have it answer."""
    users = (module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in _TRACERS)
    tables = [vars(module) for module in users if isinstance(module, ModuleType)]
    tables = [table for table in tables if "type" not in table]
    for table in tables:
        table["type"] = _Type
    try:
        yield
    finally:
        for table in tables:
            table.pop("type", None)


@contextmanager
def modules_themselves() -> Iterator[None]:
    """Within, modules under several names are traced as the objects that they are."""
    with patch.object(proxy_tensor._ModuleStackTracer, "getattr", proxy_tensor.PythonKeyTracer.getattr):
        yield
