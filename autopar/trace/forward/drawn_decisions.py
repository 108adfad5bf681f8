"""Branches on random numbers that forward draws, as LayerDrop: refused, unless any draw decides alike.

if torch.rand([]) < self.layerdrop: continue      refused by name; of 0 no layer is left out, by any draw
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_UNIFORM = (torch.rand, torch.rand_like)
_DRAWS = (*_UNIFORM, torch.randn, torch.randn_like, torch.randint, torch.bernoulli, Tensor.bernoulli)
_IN_PLACE = (Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.random_)
_ASKING = (Tensor.__bool__, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.tolist)
_BELOW = {Tensor.lt: False, Tensor.__lt__: False, Tensor.ge: True, Tensor.__ge__: True}  # of a bound of 0
_ABOVE = {Tensor.gt: False, Tensor.__gt__: False, Tensor.le: True, Tensor.__le__: True}  # of a bound of 1


class DrawnDecisions:
    """Remembers what follows from draws while a forward is traced."""

    def __init__(self) -> None:
        self._drawn: dict[int, Tensor] = {}
        self._uniform: dict[int, Tensor] = {}
        self._answers: dict[int, bool] = {}

    def after(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note the results of a function of draws, also of a list of them or as one: `all(drawn)` unbinds
        it."""
        if function in _DRAWS + _IN_PLACE or any(id(item) in self._drawn for item in _tensors(args)):
            self._drawn |= {id(item): item for item in _tensors((result,))}
        if not isinstance(result, Tensor):
            return
        if function in _UNIFORM:
            self._uniform[id(result)] = result
        if len(args) == 2 and id(args[0]) in self._uniform and isinstance(args[1], (int, float)):
            answer = _whatever_is_drawn(function, args[1])
            if answer is not None:
                self._answers[id(result)] = answer

    def answer(self, function: Any, args: tuple[Any, ...]) -> bool | None:
        """The answer that a branch on a draw always gets; None if it has no known answer."""
        return self._answers.get(id(args[0])) if function is Tensor.__bool__ else None

    def is_asked(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Whether a function asks in Python for the value of a drawn tensor."""
        return function in _ASKING and id(args[0]) in self._drawn


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, in lists and tuples too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _whatever_is_drawn(function: Any, bound: float) -> bool | None:
    """Result of comparing with any number from [0, 1); None where it depends on the number."""
    if function in _BELOW and (bound <= 0 or bound >= 1):
        return _BELOW[function] == (bound <= 0)
    if function in _ABOVE and (bound < 0 or bound >= 1):
        return _ABOVE[function] == (bound >= 1)
    return None
