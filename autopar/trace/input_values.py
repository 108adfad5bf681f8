"""What forward decides by values of its inputs: answered when the model is traced, compared at every call.

    if mask.any():               True for the batch that is traced: its program is one for True
    steps = int(lengths.max())   7: its program is one for 7

A call whose inputs give another answer has another program. What follows from parameters, buffers, random
numbers or tensors that forward changes isn't answered here, nor numbers with a fraction: hardly two batches
would share a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from autopar.trace.attribute_reads import Reads
from autopar.trace.user_source import calling_line

_WHOLE = (Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist)  # answers, of whole numbers alone
_ANSWERS = frozenset(
    (
        *(Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal),
        *(Tensor.allclose, torch.allclose, *_WHOLE),
    )
)


@dataclass(frozen=True, slots=True)
class Input:
    """The tensor at a place of the call."""

    place: int


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What a function makes of inputs; its arguments hold `Input` and `Computed` where it takes tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None = None  # of several results


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that forward asked of its inputs, the answer, and the user's line."""

    asked: Computed
    answer: Any
    line: str

    def holds(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> bool:
        """Whether a call's tensors give the same answer; `known` are values of this call."""
        answer = evaluate(self.asked, tensors, known)
        return type(answer) is type(self.answer) and bool(answer == self.answer)


def changed(decisions: Sequence[Decision], tensors: Sequence[Tensor]) -> Decision | None:
    """The first one whose answer is another for these tensors."""
    if not decisions:
        return None
    known: dict[int, Any] = {}
    with torch.no_grad():
        return next((item for item in decisions if not item.holds(tensors, known)), None)


def evaluate(value: Any, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
    """The value for the tensors of a call; each function runs once."""
    match value:
        case Input():
            return tensors[value.place]
        case Computed():
            if id(value) not in known:
                of = partial(evaluate, tensors=tensors, known=known)
                args, kwargs = tree_map(of, (value.args, value.kwargs))
                result = value.function(*args, **kwargs)
                known[id(value)] = result if value.index is None else result[value.index]
            return known[id(value)]
    return value


class InputValues(TorchFunctionMode):
    """Answers what forward asks of its inputs, by the tensors of the call that is traced.

    `fakes` stand, by place, for `tensors` in the trace. Answers go into `reads`.
    """

    def __init__(self, fakes: Mapping[int, Tensor], tensors: Sequence[Tensor], reads: Reads) -> None:
        super().__init__()
        self._tensors, self._reads = tensors, reads
        self._known: dict[int, Any] = {}  # values of the call
        self._made: dict[int, tuple[Tensor, Input | Computed]] = {  # with what keeps the identity
            id(fake): (fake, Input(place)) for place, fake in fakes.items()
        }
        if any(tensor.is_meta for tensor in tensors):
            self._made.clear()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        if not taken or not all(id(tensor) in self._made for tensor in taken):
            return function(*args, **kwargs)
        asked = Computed(function, self._by_value(args), self._by_value(kwargs))
        if function in _ANSWERS and not (function in _WHOLE and taken[0].is_floating_point()):
            return self._answer(asked, lambda: function(*args, **kwargs))
        versions = [tensor._version for tensor in taken]
        result = function(*args, **kwargs)
        if versions != [tensor._version for tensor in taken]:
            self._made.clear()  # views of what has changed would be told by old values
        else:
            self._remember(result, asked)
        return result

    def _answer(self, asked: Computed, otherwise: Callable[[], Any]) -> Any:
        """The answer for the call; where random numbers decide, what happens `otherwise`."""
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            state = torch.get_rng_state()
            answer = evaluate(asked, self._tensors, self._known)
            drew = not torch.equal(state, torch.get_rng_state())
            torch.set_rng_state(state)
        if drew:
            self._made.clear()
            return otherwise()
        self._reads.decisions.append(Decision(asked, answer, calling_line()))
        return answer

    def _remember(self, result: Any, made: Computed) -> None:
        match result:
            case Tensor():
                self._made.setdefault(id(result), (result, made))
            case tuple() | list():
                for index, item in enumerate(result):
                    if isinstance(item, Tensor):
                        one = Computed(made.function, made.args, made.kwargs, index)
                        self._made.setdefault(id(item), (item, one))

    def _by_value(self, value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: self._made[id(tensor)][1], value)
