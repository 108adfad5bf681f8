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

from torch import Tensor, nn

from autopar.torch_seams.tracing import flags, questions

_TRACERS = {"torch", "autopar", "builtins", "numpy", "sympy", *sys.stdlib_module_names}  # that see stand-ins
_LIBRARIES = (("transformers.utils.import_utils", "is_fake_tensor"),)  # beside torch, who ask of tensors


NOTE = "forward asks whether it is traced, and hears yes: eager training may do otherwise; verify shows it"


class Answers:
    """Answers that code gets in one trace; `asked` says whether any code but torch's asked."""

    def __init__(self, *, eager: bool) -> None:
        self.eager, self.asked = eager, False

    def to_torch_alone(self, flag: bool) -> Callable[[], bool]:
        """Answers torch's own code by `flag`, everybody else as eager training would."""

        def is_traced() -> bool:
            frame, names = sys._getframe(1), [question.name for question in questions]
            while frame.f_back is not None and frame.f_code.co_name in names:
                frame = frame.f_back  # torch's older names of the question
            is_torchs = str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"
            self.asked |= not is_torchs
            return flag and (is_torchs or not self.eager)

        return is_traced

    def of_tensors(self, own: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Replace a library's test for traced tensors by one that says no in eager answers."""

        def is_fake(value: Any) -> bool:
            self.asked = True
            return own(value) and not self.eager

        return is_fake


@contextmanager
def heard(answers: Answers) -> Iterator[None]:
    """Give user code these answers to its questions whether it is traced."""
    with ExitStack() as stack:
        for question, flag in zip(questions, flags, strict=True):
            stack.enter_context(question.replaced(answers.to_torch_alone(flag.now)))
            if answers.eager:  # who has imported the function reads the flag
                stack.enter_context(flag.replaced(False))
        for library, name in _LIBRARIES:
            if (module := sys.modules.get(library)) is not None and hasattr(module, name):
                stack.enter_context(patch.object(module, name, answers.of_tensors(getattr(module, name))))
        stack.enter_context(_types_asked())
        yield


class _OfStandIns(type):
    """A metaclass that acts as `type`, except on a trace's tensors."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a metaclass that was derived from it
            return super().__call__(*args, **kwargs)
        kind = type(*args, **kwargs)
        if len(args) == 1 and (kind is type or args[0] is _Type):
            return _Type
        if len(args) == 1 and issubclass(kind, Tensor) and kind.__module__.partition(".")[0] == "torch":
            return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor
        return kind

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is _Type and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is _Type else super().__hash__()

    def __repr__(cls) -> str:
        return repr(type) if cls is _Type else super().__repr__()

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, type) if cls is _Type else super().__instancecheck__(value)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is _Type else super().__subclasscheck__(kind)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class _Type(type, metaclass=_OfStandIns):
    """Stands in modules where Python's `type` would be found."""


_Type.__name__ = _Type.__qualname__ = type.__name__
_Type.__module__ = type.__module__


@contextmanager
def _types_asked() -> Iterator[None]:
    """Context in which modules of users and their libraries find `type` as eager training would have it
    answer."""
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
