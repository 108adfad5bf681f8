"""Python numbers as inputs of a program: which literals of a graph they are, proved while it is traced.

    numbers     tau = 0.7, in whose place a `Number` stands while forward is traced
    forward     if tau > 0.5:           a decision: the program is one of values that decide alike
                    x * (1 - tau)       torch is given a mark, 0.3000412..., that nothing else is
    graph       mul(x, 0.3000412...)    the literal is 1 - tau, whatever tau

Whatever else asks for the value (`int(tau)`, `math.exp(tau)`, a text of it, torch's own Python, an
output) is beyond a proof: `escaped` names it, and the number stays one that a program is made for.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias

from autopar.core.graph import Graph, ProcessNumber, Ref
from autopar.torch_seams import pytree
from autopar.torch_seams.schemas import OpOverload, OpOverloadPacket
from autopar.torch_seams.tensors import TENSOR_FILE, TENSOR_MODULE

Plain: TypeAlias = float | int
Formula: TypeAlias = Callable[[Sequence[Plain]], Any]

_SEED = 29  # marks are the same on every rank
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    OpOverload,
    OpOverloadPacket,
)


def is_number(value: object) -> bool:
    """Whether a value is a plain float or int; bools are none."""
    return type(value) in (float, int)


class NotFreeError(Exception):
    """No program for other values can be proved."""


class Numbers:
    """The numbers of one trace that may be others: their values, and those of a program that is there."""

    def __init__(self, values: Sequence[Plain], before: Sequence[Plain]) -> None:
        self.values, self.before = tuple(values), tuple(before)
        self.decisions: list[tuple[Formula, bool]] = []
        self.uses: dict[Plain, Formula] = {}  # by mark
        self.escaped: str | None = None
        self.active = True
        draw = random.Random(_SEED)
        self.items = [
            Number(self, value, _mark(value, draw), functools.partial(_at, index))
            for index, value in enumerate(self.values)
        ]

    def escapes(self, how: str) -> None:
        """Note how a number's value is asked for; the first way counts."""
        if self.active and self.escaped is None:
            self.escaped = how

    def check(self) -> None:
        """Raise NotFreeError if something has asked for a value."""
        if self.escaped is not None:
            raise NotFreeError(self.escaped)

    def formula(self, literal: object) -> Formula | None:
        """The formula of a graph's literal in the free numbers; None if it doesn't depend on them."""
        return self.uses.get(literal) if isinstance(literal, (float, int)) else None

    def as_before(self, literal: object) -> Any:
        """A literal's value, in its own type, with the numbers as they were before."""
        formula = None if isinstance(literal, bool) else self.formula(literal)
        try:
            return literal if formula is None else type(literal)(formula(self.before))  # type: ignore[call-arg]
        except (ArithmeticError, ValueError) as cause:
            raise NotFreeError("numbers of the program that is there") from cause


class Number:
    """Stands for a float or an int: Python decides by its value, torch gets its mark."""

    __slots__ = ("_formula", "_mark", "_numbers", "_value")

    def __init__(self, numbers: Numbers, value: Plain, mark: Plain, formula: Formula) -> None:
        self._numbers, self._value, self._mark, self._formula = numbers, value, mark, formula

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `function` with marks."""

        def marked(leaf: Any) -> Any:
            if type(leaf) is not Number:
                return leaf
            if not _is_builtin(function):
                leaf._numbers.escapes(f"{getattr(function, '__name__', function)}, which is Python")
            leaf._numbers.uses[leaf._mark] = leaf._formula
            return leaf._mark

        args, kwargs = pytree.tree_map(marked, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _escape(self, how: str) -> Plain:
        self._numbers.escapes(how)
        return self._value

    def __float__(self) -> float:
        return float(self._escape("float()"))

    def __int__(self) -> int:
        return int(self._escape("int()"))

    def __trunc__(self) -> int:
        return math.trunc(self._escape("trunc()"))

    def __floor__(self) -> int:
        return math.floor(self._escape("floor()"))

    def __ceil__(self) -> int:
        return math.ceil(self._escape("ceil()"))

    def __complex__(self) -> complex:
        return complex(self._escape("complex()"))

    def __index__(self) -> int:
        return operator.index(self._escape("an index"))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(self._escape("a key"))

    def __repr__(self) -> str:
        return repr(self._escape("a text"))

    def __format__(self, spec: str) -> str:
        return format(self._escape("a text"), spec)

    def __reduce__(self) -> Any:
        return type(self._value), (self._escape("a copy"),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._escape(name), name)

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, memo: Any) -> Number:
        return self

    __array_ufunc__ = None  # NumPy's numbers leave operators to this class


def _computed(function: Callable[..., Any], *operands: Any) -> Any:
    """The number that `function` makes of numbers, NotImplemented for operands that are none."""
    if not all(type(item) is Number or isinstance(item, (float, int)) for item in operands):
        return NotImplemented
    numbers = next(item._numbers for item in operands if type(item) is Number)
    value = function(*(item._value if type(item) is Number else item for item in operands))
    if not is_number(value):
        numbers.escapes(function.__name__)
        return value
    mark = function(*(item._mark if type(item) is Number else item for item in operands))
    return Number(numbers, value, mark, _composed(function, operands))


def _decided(function: Callable[..., Any], *operands: Any) -> Any:
    """Python's answer by values; later numbers must give the same one."""
    if not all(type(item) is Number or isinstance(item, (float, int)) for item in operands):
        return NotImplemented
    numbers = next(item._numbers for item in operands if type(item) is Number)
    answer = bool(function(*(item._value if type(item) is Number else item for item in operands)))
    if numbers.active:
        numbers.decisions.append((_composed(function, operands), answer))
    return answer


def _composed(function: Callable[..., Any], operands: Sequence[Any]) -> Formula:
    formulas = [
        item._formula if type(item) is Number else functools.partial(_same, item) for item in operands
    ]

    def formula(values: Sequence[Plain]) -> Any:
        return function(*[each(values) for each in formulas])

    return formula


def _at(index: int, values: Sequence[Plain]) -> Plain:
    return values[index]


def _same(value: Plain, values: Sequence[Plain]) -> Plain:
    return value


def _operators() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)
        yield f"__{name}__", lambda self, other, run=function: _computed(run, self, other)
        yield f"__r{name}__", lambda self, other, run=function: _computed(run, other, self)
    for name in ("neg", "pos", "abs"):
        function = getattr(operator, name)
        yield f"__{name}__", lambda self, run=function: _computed(run, self)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        function = getattr(operator, name)
        yield f"__{name}__", lambda self, other, run=function: _decided(run, self, other)
    yield "__bool__", lambda self: _decided(bool, self)
    yield "__round__", lambda self, *digits: _computed(round, self, *digits)


for _name, _method in _operators():
    setattr(Number, _name, _method)


def _given(value: float) -> float:
    return value


def _is_builtin(function: Any) -> bool:
    """Whether a function is a builtin, or an operator of Tensor, which passes its arguments on to one."""
    if isinstance(function, _BUILTIN) or function is _given:
        return True
    wrapped = getattr(function, "__wrapped__", None)
    if getattr(function, "__module__", None) != TENSOR_MODULE and wrapped is None:
        return False
    own = getattr(getattr(function, "__code__", None), "co_filename", None) == TENSOR_FILE
    return own and (isinstance(wrapped, _BUILTIN) or function.__name__.startswith("__"))


def _mark(value: Plain, draw: random.Random) -> Plain:
    """A number near `value`, towards 0, that no model has; of an int a large one."""
    if isinstance(value, int):
        return draw.randrange(1 << 28, 1 << 30)
    if not math.isfinite(value):
        return value
    return (value or 1e-5) * (1 - draw.uniform(0.5, 1) * 2.0**-12)


# -- the trace in hand ----------------------------------------------------------------------------------

_current: ContextVar[Numbers | None] = ContextVar("numbers that may be others", default=None)


@contextmanager
def freed(numbers: Numbers) -> Iterator[Numbers]:
    """Let traces hold for any values of these numbers."""
    token = _current.set(numbers)
    try:
        yield numbers
    finally:
        numbers.active = False
        _current.reset(token)


def require_none(what: str, *trees: Any) -> None:
    """Note that a number's value is fixed if one of the numbers is part of `what`."""
    numbers = _current.get()
    if numbers is not None and any(type(leaf) is Number for leaf in pytree.tree_leaves(trees)):
        numbers.escapes(what)


def computed(function: Callable[[Any], Any], literal: Plain) -> Any:
    """Compute a literal of a graph from another; it may change with the numbers that the other is made of."""
    result, numbers = function(literal), _current.get()
    formula = numbers.formula(literal) if numbers is not None else None
    if numbers is not None and formula is not None:
        numbers.uses[result] = lambda values: function(formula(values))
    return result


def is_float(value: object) -> bool:
    """Whether a value is a plain float, or a `Number` that stands for one."""
    return type(value) is float or (type(value) is Number and isinstance(value, float))


def marked(values: Sequence[Any]) -> list[float]:
    """Marked floats that torch receives in place of `values`."""
    return [float(Number.__torch_function__(_given, (), (value,))) for value in values]


def watched(values: Sequence[Any]) -> list[float]:
    """Floats for code that runs apart from the trace, and must not decide by those that may be others."""
    return [_WatchedFloat(value) if type(value) is Number else value for value in values]


def _watching(name: str) -> Callable[..., Any]:
    own = getattr(float, name)

    def method(self: _WatchedFloat, *others: Any) -> Any:
        self.number._numbers.escapes(f"{name} in a custom backward")
        return own(self, *others)

    return method


class _WatchedFloat(float):
    """A float that notes when something decides by it."""

    number: Number

    def __new__(cls, number: Number) -> _WatchedFloat:
        made = super().__new__(cls, number._value)
        made.number = number
        return made

    __lt__ = _watching("__lt__")
    __le__ = _watching("__le__")
    __gt__ = _watching("__gt__")
    __ge__ = _watching("__ge__")
    __eq__ = _watching("__eq__")
    __ne__ = _watching("__ne__")
    __bool__ = _watching("__bool__")
    __int__ = _watching("__int__")
    __hash__ = _watching("__hash__")
    __repr__ = _watching("__repr__")


def as_before(graph: Graph) -> Graph:
    """The graph with the numbers for which a program exists; raises NotFreeError where a trace has shown that
    there is none."""
    numbers = _current.get()
    if numbers is None:
        return graph
    numbers.check()

    def old(tree: Any) -> Any:
        match tree:
            case Ref() | ProcessNumber():
                return tree
            case tuple():
                return tuple(map(old, tree))
            case list():
                return list(map(old, tree))
            case dict():
                return {key: old(item) for key, item in tree.items()}
            case _:
                return numbers.as_before(tree)

    operators = (replace(item, args=old(item.args), kwargs=old(item.kwargs)) for item in graph.operators)
    return replace(graph, operators=tuple(operators))


def require_known() -> None:
    """Raise NotFreeError where a plan would have to be searched for the sake of such numbers."""
    if _current.get() is not None:
        raise NotFreeError("another graph")
