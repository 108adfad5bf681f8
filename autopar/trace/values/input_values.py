"""What forward decides by values of its inputs: answered when the model is traced, compared at every call.

    if mask.any():               True for the batch that is traced: its program is one for True
    steps = int(lengths.max())   7: its program is one for 7

A call whose inputs give another answer has another program. What follows from numbers alone, such as a mask
of ones, is answered and compared with nothing. What follows from parameters, buffers, random numbers or
tensors that forward changes isn't answered here, nor numbers with a fraction: hardly two batches would share
a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.torch_seams.modes import without_functions, without_modes
from autopar.torch_seams.pytree import tree_leaves, tree_map, tree_map_only
from autopar.torch_seams.tensors import version_of
from autopar.trace.call.user_source import calling_line
from autopar.trace.forward.forward_error import ForwardError
from autopar.trace.reads.attribute_reads import Reads

_IS_LEAF: Any = Tensor.is_leaf
_GRAD: Any = Tensor.grad
_GRAD_FN: Any = Tensor.grad_fn
_LIES = frozenset((_IS_LEAF.__get__, Tensor.is_contiguous, Tensor.stride))  # whatever the values
_WHOLE = (Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist)  # answers, of whole numbers alone
_ANSWERS = frozenset(
    (
        *(Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal),
        *(Tensor.allclose, torch.allclose, *_WHOLE),
    )
).union(_LIES)
_MAKERS = frozenset((torch.tensor, torch.full, torch.arange, torch.eye, torch.linspace))
_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
_FILLED = {  # of one number, whatever the tensor is like
    **dict.fromkeys((torch.ones, torch.ones_like, Tensor.new_ones), 1),
    **dict.fromkeys((torch.zeros, torch.zeros_like, Tensor.new_zeros), 0),
}


@dataclass(frozen=True, slots=True)
class Input:
    """The tensor at a place of the call."""

    place: int


@dataclass(frozen=True, slots=True, eq=False)
class ComputedValue:
    """A function's value on inputs; its arguments hold `Input` and `ComputedValue` in place of tensors.

    Each is one of its own, also in a table: an object that is freed leaves its place in memory to another.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None = None  # of several results


@dataclass(frozen=True, slots=True, eq=False)
class _KnownTensor:
    """A tensor, held to keep its identity, whose value is known as of a version, which views share."""

    tensor: Tensor
    value: Input | ComputedValue
    version: int


@dataclass(frozen=True, slots=True)
class _OnCopy:
    """Result of an in-place function on a copy of its first argument."""

    function: Callable[..., Any]

    def __call__(self, written: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied = written.clone()
        self.function(copied, *args, **kwargs)
        return copied


@dataclass(frozen=True, slots=True)
class InputDecision:
    """A question that forward asked of its inputs, the answer, and the user's line; `of_values`, or of how
    they lie."""

    asked: ComputedValue
    answer: Any
    line: str
    of_values: bool = True

    def holds(self, tensors: Sequence[Tensor], known: dict[ComputedValue, Any]) -> bool:
        """Whether a call's tensors give the same answer; `known` are values that were computed for this
        call."""
        answer = evaluate(self.asked, tensors, known)
        return type(answer) is type(self.answer) and bool(answer == self.answer)


def changed(decisions: Sequence[InputDecision], tensors: Sequence[Tensor]) -> InputDecision | None:
    """The first one whose answer is another for these tensors."""
    if not decisions:
        return None
    known: dict[ComputedValue, Any] = {}
    with torch.no_grad():
        return next((item for item in decisions if not item.holds(tensors, known)), None)


def evaluate(value: Any, tensors: Sequence[Tensor], known: dict[ComputedValue, Any]) -> Any:
    """The value for the tensors of a call; each function runs once."""
    match value:
        case Input():
            return tensors[value.place]
        case ComputedValue():
            if value not in known:
                of = partial(evaluate, tensors=tensors, known=known)
                args, kwargs = tree_map(of, (value.args, value.kwargs))
                result = value.function(*args, **kwargs)
                known[value] = result if value.index is None else result[value.index]
            return known[value]
    return value


class InputValues(TorchFunctionMode):
    """Answers what forward asks of its inputs, by the tensors of the call that is traced.

    `fakes` stand, by place, for `tensors` in the trace. Answers go into `reads`.
    """

    def __init__(self, fakes: Mapping[int, Tensor], tensors: Sequence[Tensor], reads: Reads) -> None:
        super().__init__()
        self._tensors, self._reads = tensors, reads
        self._known: dict[ComputedValue, Any] = {}  # values of the call
        self._made: dict[int, _KnownTensor] = {}
        if not any(tensor.is_meta for tensor in tensors):
            for place, fake in fakes.items():
                self._remember(fake, Input(place))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _FILLED or function in _MAKERS:
            return self._make(function, args, kwargs)
        taken = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        if function == _GRAD.__get__ and isinstance(taken[0], torch.nn.Parameter):
            raise _reads_gradients()
        if not taken or not all(map(self._is_known, taken)):
            return function(*args, **kwargs)
        if function == _GRAD_FN.__get__:
            return self._node_of(taken[0])
        asked = ComputedValue(function, self._by_value(args), self._by_value(kwargs))
        if function in _ANSWERS and not (function in _WHOLE and taken[0].is_floating_point()):
            return self._answer(asked, lambda: function(*args, **kwargs))
        result = function(*args, **kwargs)
        if all(map(self._is_known, taken)):
            self._remember_all(result, asked)
        elif "out" not in kwargs and args and isinstance(args[0], Tensor) and not self._is_known(args[0]):
            self._remember(args[0], replace(asked, function=_OnCopy(function)))
        return result

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor's value is known: of one that was written, or a view of which was, it isn't."""
        known = self._made.get(id(tensor))
        return known is not None and known.version == version_of(tensor)

    def _make(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of numbers alone, whose values are known; of one that is like another, its shape is."""
        result = function(*args, **kwargs)
        plain = all(isinstance(leaf, _PLAIN) for leaf in tree_leaves((args, kwargs)))
        if isinstance(result, Tensor) and "out" not in kwargs:
            shape = tuple(result.shape)
            if function in _FILLED and not any(isinstance(size, torch.SymInt) for size in shape):
                self._remember(
                    result, ComputedValue(torch.full, (shape, _FILLED[function]), {"dtype": result.dtype})
                )
            elif function in _MAKERS and plain:
                self._remember(
                    result, ComputedValue(function, self._by_value(args), {**kwargs, "device": None})
                )
        return result

    def _answer(self, asked: ComputedValue, otherwise: Callable[[], Any]) -> Any:
        """The answer for the call; where random numbers decide, what happens `otherwise`."""
        with torch.no_grad(), without_functions(), without_modes():
            state = torch.get_rng_state()
            answer = evaluate(asked, self._tensors, self._known)
            drew = not torch.equal(state, torch.get_rng_state())
            torch.set_rng_state(state)
        if drew:
            self._made.clear()
            return otherwise()
        if _takes_inputs(asked):
            of_values = asked.function not in _LIES
            self._reads.decisions.append(InputDecision(asked, answer, calling_line(), of_values))
        return answer

    def _node_of(self, tensor: Tensor) -> Any:
        """Autograd node of a tensor that requires gradients: of an input, that of this call, if any."""
        known = self._made[id(tensor)].value
        if not isinstance(known, Input):
            return _GRAD_FN.__get__(tensor)
        is_leaf = self._answer(ComputedValue(_IS_LEAF.__get__, (known,), {}), lambda: True)
        return None if is_leaf else self._tensors[known.place].grad_fn

    def _remember_all(self, result: Any, made: ComputedValue) -> None:
        match result:
            case Tensor() if not self._is_known(result):
                self._remember(result, made)
            case tuple() | list():
                for index, item in enumerate(result):
                    if isinstance(item, Tensor) and not self._is_known(item):
                        self._remember(item, replace(made, index=index))

    def _remember(self, tensor: Tensor, value: Input | ComputedValue) -> None:
        self._made[id(tensor)] = _KnownTensor(tensor, value, version_of(tensor))

    def _by_value(self, value: Any) -> Any:
        """The arguments with what is known of tensors, which have values also where devices have none."""
        value = tree_map_only(torch.device, _with_values, value)
        return tree_map_only(Tensor, lambda tensor: self._made[id(tensor)].value, value)


def _reads_gradients() -> ForwardError:
    return ForwardError(
        "parameter.grad, which is another at each call",
        "a forward that reads no gradients",
        "read it outside of forward, and pass what follows from it as an argument",
    )


def _with_values(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _takes_inputs(value: Any) -> bool:
    """Whether a value follows from inputs of the call."""
    if isinstance(value, ComputedValue):
        return any(map(_takes_inputs, tree_leaves((value.args, dict(value.kwargs)))))
    return isinstance(value, Input)
