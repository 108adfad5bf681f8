"""Branches that clamp what isn't finite are taken always, where the clamp leaves alone what is.

    if not torch.isfinite(x).all():         clamp(x, -c, c), for any x
        c = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, -c, c)

In float32 and bfloat16 that c rounds to the largest finite number. Of finite values the clamp changes none
then, nor their gradients; so both ways of the branch are one program. A branch that does anything else first
depends on values and is refused. So are branches on infinite values alone (`isinf`), as a clamp changes the
gradient of what is no number; those in float16, whose c is another number; and those under autocast, where
the dtype in a trace isn't always the program's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.torch_seams.tensors import version_of

_CHECKS = (torch.isfinite, Tensor.isfinite)
_REDUCTIONS = (torch.all, Tensor.all)
BELOW = 1000  # the largest number: where libraries clamp
_CLAMPS = (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class _Check:
    """A check's `result`, held so that its id stays its own; it is that of this version of `source`."""

    result: Tensor
    source: Tensor
    version: int

    @property
    def holds_for_any(self) -> bool:
        """Whether the check holds for any values: the source can always be clamped, and hasn't been written
        since."""
        dtype = self.source.dtype
        return (
            not self.result.dim()
            and version_of(self.source) == self.version
            and _rounds_to_most(torch.finfo(dtype).max - BELOW, dtype)
            and not any(map(torch.is_autocast_enabled, _DEVICES))
        )


class FiniteChecks:
    """Questions of a forward about values that aren't finite, and the clamp that it owes for the answer."""

    def __init__(self, refuse: Callable[[], Exception]) -> None:
        self.refuse = refuse
        self._known: dict[int, _Check] = {}
        self._owed: Tensor | None = None

    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise the refusal if a clamp is owed and the call, unless it reads an attribute, is another."""
        if self._owed is None or getattr(function, "__name__", "") == "__get__":
            return
        if function not in _CLAMPS or not args or args[0] is not self._owed:
            raise self.refuse()  # and again, where a `try` of forward catches that
        if not _keeps_finite(*args, **kwargs):
            raise self.refuse()
        self._owed = None

    def answers_no(self, function: Any, args: tuple[Any, ...]) -> bool:
        """True if the call is `bool(isfinite(x).all())` and x may always be clamped; the trace then takes the
        False branch."""
        check = self._known.get(id(args[0])) if function in (Tensor.__bool__, Tensor.item) else None
        if check is None or not check.holds_for_any:
            return False
        self._owed = check.source
        return True

    def after(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember the checks that a call makes."""
        if function in _CHECKS and len(args) == 1 and args[0].is_floating_point():
            self._known[id(result)] = _Check(result, args[0], version_of(args[0]))
        elif function in _REDUCTIONS and len(args) == 1 and not kwargs:
            check = self._known.get(id(args[0]))
            if check is not None:
                self._known[id(result)] = replace(check, result=result)

    def end(self) -> None:
        """Raise the refusal if a clamp is owed still."""
        if self._owed is not None:
            self._owed = None
            raise self.refuse()


def _keeps_finite(x: Tensor, min: Any = None, max: Any = None) -> bool:
    """Whether a clamp changes no finite value: its bounds round to the dtype's largest ones."""
    return all(isinstance(each, float) for each in (min, max)) and all(
        _rounds_to_most(each, x.dtype) for each in (-min, max)
    )


def _rounds_to_most(value: float, dtype: torch.dtype) -> bool:
    most = torch.finfo(dtype).max
    return value <= most and torch.tensor(value, dtype=torch.float64).to(dtype).item() == most
