"""One call of the user's that has a backward of its own: a Function's, or a hook on a tensor.

Flip.apply(x, 0.7)  ->  operands [x], numbers [0.7], and what puts others in their places
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from autopar.torch_seams import pytree
from autopar.torch_seams.autograd import SingleLevelFunction
from autopar.trace.reads.numbers import is_float

_PRIMITIVE = (int, bool, str, bytes, float, complex, type(None), torch.dtype, torch.device, torch.Size)


class NotTensorsError(RuntimeError):
    """A Function returns something that is no tensor."""


class _Slot:
    """Where a tensor or a floating number stands among the arguments."""


_TENSOR, _NUMBER = _Slot(), _Slot()


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of an autograd.Function, its tensors and floating numbers taken out."""

    function: Any
    leaves: tuple[Any, ...]  # constants, and slots
    structure: Any

    @staticmethod
    def of(function: Any, args: tuple[Any, ...]) -> tuple[FunctionCall, list[Tensor], list[float]]:
        """The call, its operands and its numbers. Tensors inside lists get no gradient, as in torch."""
        leaves, structure = pytree.tree_flatten(args)
        outside = {id(item) for item in args}
        tensors = [item for item in leaves if isinstance(item, Tensor)]
        operands = [item if id(item) in outside else item.detach() for item in tensors]
        numbers = [item for item in leaves if is_float(item)]
        return FunctionCall(function, tuple(map(_slot, leaves)), structure), operands, numbers

    @property
    def title(self) -> str:
        return str(self.function.__qualname__)

    @property
    def identity(self) -> Any:
        return self.function, self.structure, tuple(map(_identity, self.leaves))

    @property
    def code(self) -> str:
        """The function's code and constants as text, the same on all ranks."""
        bases = (base for base in self.function.__mro__ if base not in torch.autograd.Function.__mro__)
        methods = [item for base in bases for item in vars(base).values()]
        return repr((self.title, [_code(item) for item in methods], [_word(item) for item in self.leaves]))

    def call(self, operands: Sequence[Tensor], numbers: Sequence[float]) -> Any:
        """The user's result: torch's own context, the user's backward."""
        return self.function.apply(*self.arguments(operands, numbers))

    def run(self, operands: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Tensor, ...]:
        """The tensors of `call`."""
        return tensors_of(self.call(operands, numbers))

    def forward(self, operands: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Tensor, ...]:
        """Run the Function's forward as plain operators, which autograd differentiates."""
        return tensors_of(self.plainly(operands, numbers))

    def plainly(self, operands: Sequence[Tensor], numbers: Sequence[float]) -> Any:
        """The result of forward as plain operators, as if the Function had no backward of its own."""
        args = self.arguments(operands, numbers)
        if self.function.setup_context != SingleLevelFunction.setup_context:
            return self.function.forward(*args)
        return self.function.forward(_Context(args), *args)

    def arguments(self, operands: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        tensors, floats = iter(operands), iter(numbers)
        filled = [
            next(tensors) if leaf is _TENSOR else next(floats) if leaf is _NUMBER else leaf
            for leaf in self.leaves
        ]
        args: tuple[Any, ...] = pytree.tree_unflatten(filled, self.structure)
        return args


@dataclass(frozen=True, slots=True)
class HookCall:
    """A tensor with a hook on its gradient."""

    hook: Callable[[Tensor], Any]

    @property
    def title(self) -> str:
        return f"register_hook({getattr(self.hook, '__qualname__', type(self.hook).__name__)})"

    @property
    def identity(self) -> Any:
        function = getattr(self.hook, "__func__", self.hook)
        if not isinstance(function, FunctionType):
            return _identity(self.hook)
        cells = tuple(map(_content, function.__closure__ or ()))
        defaults = tuple(map(_identity, function.__defaults__ or ()))
        return function.__code__, cells, defaults, id(getattr(self.hook, "__self__", None))

    @property
    def code(self) -> str:
        return repr((self.title, _code(getattr(self.hook, "__func__", self.hook))))

    def call(self, operands: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
        """The tensor itself, whose gradient goes through the hook."""
        (x,) = operands
        same = x.view_as(x)
        if same.requires_grad:
            same.register_hook(self.hook)
        return same

    def run(self, operands: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Tensor, ...]:
        """Run the call, and give its result as a tuple."""
        return (self.call(operands, numbers),)


class NoGradientError(RuntimeError):
    """A hook returns nothing: it only watches."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A hook that must return a gradient."""

    hook: Callable[[Tensor], Any]

    def __call__(self, gradient: Tensor) -> Any:
        """Raises NoGradientError."""
        answer = self.hook(gradient)
        if answer is None:
            raise NoGradientError
        return answer


class _Context:
    """Context of a forward where no backward of its own will run."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(item, Tensor) and item.requires_grad for item in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_dirty(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def tensors_of(results: Any) -> tuple[Tensor, ...]:
    """Tensors among a Function's results; raises NotTensorsError for anything but tensors and None."""
    items = results if isinstance(results, tuple) else (results,)
    wrong = [item for item in items if item is not None and not isinstance(item, Tensor)]
    if wrong or all(item is None for item in items):
        raise NotTensorsError(type(wrong[0]).__name__ if wrong else "None")
    return tuple(item for item in items if item is not None)


def pattern_of(results: Any) -> tuple[bool, ...] | None:
    """Flags of results that are tensors; None for a single result."""
    return tuple(item is not None for item in results) if isinstance(results, tuple) else None


def rebuilt(tensors: Sequence[Tensor], pattern: tuple[bool, ...] | None) -> Any:
    """The tensors as a Function of that pattern returns them."""
    if pattern is None:
        return tensors[0]
    left = iter(tensors)
    return tuple(next(left) if there else None for there in pattern)


def digest(*texts: Any) -> str:
    """A short word for the texts."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:12]


def _slot(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, Tensor) else _NUMBER if is_float(leaf) else leaf


def _identity(value: Any) -> Any:
    """Equal for values that are the same for good: equal constants, or one object."""
    if isinstance(value, _PRIMITIVE):
        return type(value), value
    return id(value)


def _content(cell: CellType) -> Any:
    try:
        return _identity(cell.cell_contents)
    except ValueError:  # it is empty
        return id(cell)


def _word(leaf: Any) -> str:
    return repr(leaf) if isinstance(leaf, _PRIMITIVE) else type(leaf).__qualname__


def _code(item: Any) -> Any:
    function = getattr(item, "__func__", item)
    code = getattr(function, "__code__", function)
    if not isinstance(code, CodeType):
        return type(item).__qualname__
    return code.co_code.hex(), code.co_names, [_constant(value) for value in code.co_consts]


def _constant(value: Any) -> Any:
    return _code(value) if isinstance(value, CodeType) else _word(value)
