"""Follows inputs through a trace: on whose values a number, size or branch that it failed by depends.

    size = kind.max() + 1        follows from kind: an input that may be at fault
    torch.zeros(int(size))       u0, which stands for the number, follows from it as well
    if u0 > 3:                   refused: kind is

What has met a parameter or random numbers follows from these as well, so no input alone is at fault. A tensor
that is written follows from all that is written into it. In a graph that is written down, operands lead back
to inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.core.graph import GraphInput, InputKind, Operator
from autopar.torch_seams.modes import without_functions
from autopar.torch_seams.pytree import tree_leaves

DRAWS = ("rand", "bernoulli", "multinomial", "dropout", "normal", "poisson", "exponential")
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
Sources = frozenset[int]
ELSEWHERE = -1  # the place of parameters and of random numbers


class AskedInputs(TorchFunctionMode):
    """Follows inputs through forward; `fakes` stand for them, by place."""

    def __init__(self, fakes: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._of: MutableMapping[Tensor, Sources] = WeakTensorKeyDictionary()
        for place, fake in fakes.items():
            self._of[fake] = Sources((place,))
        self._symbols: dict[Any, Sources] = {}
        self._last = Sources()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (Tensor, *_NUMBERS))]
        if not taken:
            return function(*args, **(kwargs or {}))
        sources = Sources().union(*map(self._sources, taken))
        name = getattr(function, "__name__", "")
        if any(word in name for word in DRAWS):
            sources |= {ELSEWHERE}
        try:
            result = function(*args, **(kwargs or {}))
        except Exception:
            self._last = sources
            raise
        self._note(result, sources)
        if name.endswith("_") and isinstance(first := next(iter((*args, *(kwargs or {}).values()))), Tensor):
            self._of[first] = sources  # written, unless it is a question such as __len__
        return result

    def at_fault(self, cause: BaseException | None) -> Sources:
        """The inputs, by place, whose values were asked when `cause` was raised; none unless theirs alone."""
        found = self._last
        while cause is not None:
            symbols = _symbols(getattr(cause, "cond", None))
            if known := [self._symbols[symbol] for symbol in symbols if symbol in self._symbols]:
                found = Sources().union(*known)  # of numbers that earlier calls gave
            cause = cause.__cause__
        return Sources() if ELSEWHERE in found else found

    def _sources(self, value: Any) -> Sources:
        if isinstance(value, Tensor):
            learns = isinstance(value, torch.nn.Parameter)
            return self._of.get(value, Sources((ELSEWHERE,)) if learns else Sources())
        return Sources().union(*(self._symbols.get(symbol, Sources()) for symbol in _symbols(value)))

    def _note(self, result: Any, sources: Sources) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._of[leaf] = sources
                with without_functions():
                    numbers: list[Any] = [size for size in leaf.shape if isinstance(size, torch.SymInt)]
            else:
                numbers = [leaf] if isinstance(leaf, _NUMBERS) else []
            for symbol in (symbol for number in numbers for symbol in _symbols(number)):
                self._symbols.setdefault(symbol, sources)


def _symbols(value: Any) -> tuple[Any, ...]:
    """Symbols in a number or a condition for values that a trace doesn't know."""
    expression = getattr(getattr(value, "node", None), "expr", value)
    return tuple(getattr(expression, "free_symbols", ()))


def inputs_behind(
    names: Collection[str], inputs: Mapping[str, GraphInput], operators: list[Operator]
) -> frozenset[str]:
    """The paths of the arguments that values of these names follow from; none where parameters are behind."""
    behind = set(names)
    for operation in reversed(operators):
        if behind.intersection(operation.results):
            behind.update(operation.operands)
    found = [item for name, item in inputs.items() if name in behind]
    if any(item.kind is InputKind.PARAMETER for item in found):
        return frozenset()
    return frozenset(item.target for item in found if item.kind is InputKind.USER)
