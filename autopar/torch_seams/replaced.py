"""Attributes of torch's in whose place others are put: within a block, or for good.

with proxy_call.replaced(call): ...       torch's own is back afterwards
run_backward.wrap(refusing)               refusing(torch's own) from now on, once however often it is said
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from autopar.torch_seams.required import expect

_MARK = "_autopar_wraps"
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]  # of torch's own function, which ours calls


@dataclass(frozen=True, slots=True)
class Replaceable:
    """An attribute by its owner, a module, class or object; raises InputError if it isn't there."""

    owner: Any
    name: str

    def __post_init__(self) -> None:
        expect(hasattr(self.owner, self.name), f"{self.name} of {self.owner!r}")

    @property
    def now(self) -> Any:
        return getattr(self.owner, self.name)

    def replaced(self, new: Any) -> AbstractContextManager[Any]:
        """Within, `new` stands in its place."""
        return patch.object(self.owner, self.name, new)

    def wrap(self, wrap: Wrap) -> None:
        """Put `wrap` of a function in its place for good, unless that was done."""
        setattr(self.owner, self.name, wrapped(self.now, wrap))


def wrapped(function: Callable[..., Any], wrap: Wrap) -> Callable[..., Any]:
    """`wrap` of the function, under its name; the function itself if it is such a one already."""
    if hasattr(function, _MARK):
        return function
    made = functools.wraps(function)(wrap(function))
    setattr(made, _MARK, True)
    return made
