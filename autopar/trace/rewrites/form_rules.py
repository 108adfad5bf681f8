"""Rules by which an operator's closed form follows from those of its operands.

A tensor whose maker has no rule here has no form: it stays a tensor like any other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from autopar.core.graph import Ref
from autopar.trace.rewrites.closed_forms import (
    HIDDEN,
    AnyForm,
    Form,
    Line,
    LineSize,
    Number,
    TwoNumbers,
    complement,
    padded,
)


@dataclass(frozen=True, slots=True)
class FormCall:
    """One call: arguments by name, operands' forms, and the tensor that it gives."""

    arguments: Mapping[str, Any]
    forms: Mapping[str, AnyForm]
    specs: Mapping[str, Any]
    result: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.specs[self.result].shape)

    @property
    def is_bool(self) -> bool:
        return bool(self.specs[self.result].dtype is torch.bool)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name)
        return default if value is None else value

    def form(self, name: str) -> Form | None:
        """The form of an argument: a tensor's, or a number's; none of sizes, which `size` gives."""
        value = self.arguments.get(name)
        if isinstance(value, Ref):
            form = self.forms[value.name]
            return None if isinstance(form, LineSize) else form
        return Line((), value) if isinstance(value, (bool, int, float)) else None

    def size(self, name: str) -> LineSize | None:
        value = self.arguments.get(name)
        form = self.forms[value.name] if isinstance(value, Ref) else None
        return form if isinstance(form, LineSize) else None

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.specs[self.arguments[name].name].shape)

    def simple(self, form: AnyForm) -> AnyForm | None:
        """The form without slopes and lines that say nothing; None where a number isn't held exactly."""
        if isinstance(form, LineSize):
            line = self.simple(form.line)
            return LineSize(line) if isinstance(line, Line) else None
        if isinstance(form, Line):
            form = self._along_dims(form)
            ends = form.least(self.shape), -form.times(-1).least(self.shape)
            return form if all(map(self._holds, ends)) else None
        if not (self._holds(form.inside) and self._holds(form.outside)):
            return None
        lines = []
        for line in dict.fromkeys(self._along_dims(line).reduced for line in form.lines):
            if -line.times(-1).least(self.shape) < 0:
                return Line((), form.outside)
            if line.least(self.shape) < 0:
                lines.append(line)
        return TwoNumbers(tuple(lines), form.inside, form.outside) if lines else Line((), form.inside)

    def _along_dims(self, line: Line) -> Line:
        """The line without slopes along dims of one element, which may be expanded next."""
        sizes = self.shape[len(self.shape) - len(line.slopes) :]
        slopes = (slope if size != 1 else 0 for slope, size in zip(line.slopes, sizes, strict=True))
        return Line(tuple(slopes), line.offset)

    def _holds(self, number: Number) -> bool:
        """Whether the result's dtype has the number; of numbers that only hide a score any will do."""
        dtype = self.specs[self.result].dtype
        if dtype.is_floating_point:
            return number <= HIDDEN or abs(number) <= 2 / torch.finfo(dtype).eps
        whole = number == number and abs(number) != math.inf and number == int(number)
        if dtype is torch.bool or not whole:
            return whole
        return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max  # else it wraps


_Rule: TypeAlias = Callable[[FormCall], AnyForm | None]


# -- what makes numbers -----------------------------------------------------------------------------------


def _arange(given: FormCall) -> Form | None:
    start, step = given.get("start", 0), given.get("step", 1)
    return Line((step,), start) if isinstance(start, int) and isinstance(step, int) else None


def _number(value: Any) -> _Rule:
    return lambda given: Line((), value)


def _full(given: FormCall) -> Form | None:
    return given.form("fill_value") if "fill_value" in given.arguments else given.form("s")


# -- what moves dims --------------------------------------------------------------------------------------


def _with_slopes(form: Form, change: Callable[[tuple[int, ...]], tuple[int, ...]], rank: int) -> Form:
    """The form with each line's slopes, of a tensor of `rank` dims, changed."""

    def changed(line: Line) -> Line:
        return Line(change(padded(line.slopes, rank)), line.offset)

    if isinstance(form, Line):
        return changed(form)
    return TwoNumbers(tuple(map(changed, form.lines)), form.inside, form.outside)


def _same(given: FormCall) -> Form | None:
    form = given.form("self")
    return form if form is not None else given.form("input")


def _cast(given: FormCall) -> Form | None:
    return _truth(given, "self") if given.is_bool else given.form("self")


def _reshaped(given: FormCall) -> Form | None:
    """A reshape that puts or leaves out dims of size 1."""
    form, before, after = given.form("self"), given.shape_of("self"), given.shape
    if form is None or [size for size in before if size != 1] != [size for size in after if size != 1]:
        return form if isinstance(form, Line) and form.is_number else None

    def change(slopes: tuple[int, ...]) -> tuple[int, ...]:
        long = iter([slope for slope, size in zip(slopes, before, strict=True) if size != 1])
        return tuple(0 if size == 1 else next(long) for size in after)

    return _with_slopes(form, change, len(before))


def _permuted(given: FormCall) -> Form | None:
    form, rank = given.form("self"), len(given.shape)
    order = list(range(rank))
    if "dims" in given.arguments:
        order = [dim % rank for dim in given["dims"]]
    elif "dim0" in given.arguments:
        one, two = given["dim0"] % rank, given["dim1"] % rank
        order[one], order[two] = two, one
    else:
        order.reverse()
    return form and _with_slopes(form, lambda slopes: tuple(slopes[dim] for dim in order), rank)


def _moved(form: Form, dim: int, start: int, step: int) -> Form:
    """The form whose index along `dim` is start + step times the new one."""

    def changed(line: Line) -> Line:
        slope = line.slopes[dim]
        slopes = (*line.slopes[:dim], slope * step, *line.slopes[dim + 1 :])
        return Line(slopes, line.offset + slope * start)

    if isinstance(form, Line):
        return changed(form)
    return TwoNumbers(tuple(map(changed, form.lines)), form.inside, form.outside)


def _sliced(given: FormCall) -> Form | None:
    form, shape = given.form("self"), given.shape_of("self")
    if form is None:
        return None
    dim, start = given.get("dim", 0) % len(shape), given.get("start", 0)
    start = min(shape[dim], max(0, start + shape[dim] if start < 0 else start))
    whole = _with_slopes(form, lambda slopes: slopes, len(shape))
    return _moved(whole, dim, start, given.get("step", 1))


def _selected(given: FormCall) -> Form | None:
    form, shape = given.form("self"), given.shape_of("self")
    if form is None:
        return None
    dim = given["dim"] % len(shape)
    chosen = _moved(
        _with_slopes(form, lambda slopes: slopes, len(shape)), dim, given["index"] % shape[dim], 0
    )
    return _with_slopes(chosen, lambda slopes: (*slopes[:dim], *slopes[dim + 1 :]), len(shape))


def _picked(given: FormCall) -> Form | None:
    """Rows that an index picks of numbers that are all one."""
    form = given.form("self")
    return form if isinstance(form, Line) and form.is_number else None


def _indexed(given: FormCall) -> Form | None:
    """Rows that lines of indices pick, each of a dim of its own; these are neighbours."""
    form, shape, indices = given.form("self"), given.shape_of("self"), list(given["indices"])
    places = [place for place, index in enumerate(indices) if index is not None]
    if form is None or isinstance(form, Line) and form.is_number:
        return form
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None
    first, stop, rank = places[0], places[-1] + 1, len(given.shape)
    lines = [_index_of(given, indices[place], shape[place]) for place in places]
    picked = rank - len(shape) + stop - first  # dims that the indices have together
    if None in lines:
        return None

    def changed(line: Line) -> Line:
        slopes = padded(line.slopes, len(shape))
        rows = Line((0,) * picked, line.offset)
        for slope, index in zip(slopes[first:stop], lines, strict=True):
            rows = rows.plus(index.times(slope)) if index is not None else rows
        return Line((*slopes[:first], *rows.slopes, *slopes[stop:]), rows.offset)

    if isinstance(form, Line):
        return changed(form)
    return TwoNumbers(tuple(map(changed, form.lines)), form.inside, form.outside)


def _index_of(given: FormCall, index: Ref, size: int) -> Line | None:
    """The line of an index of integers that are places of a dim, none of them counted from its end."""
    form, spec = given.forms[index.name], given.specs[index.name]
    if not isinstance(form, Line) or spec.dtype not in (torch.int64, torch.int32):
        return None
    least, most = form.least(spec.shape), -form.times(-1).least(spec.shape)
    return form if least >= 0 and most < size else None


def _joined(given: FormCall) -> Form | None:
    """Parts that go on where the ones before end."""
    return _line_through(given, given["tensors"], given.get("dim", 0) % len(given.shape))


def _differences(given: FormCall) -> Form | None:
    """A line's step along a dim, also from what goes before and to what comes after."""
    parts = [given.arguments.get(name) for name in ("prepend", "self", "append")]
    dim = given.get("dim", -1) % len(given.shape)
    line = _line_through(given, [part for part in parts if part is not None], dim)
    once = given.get("n", 1) == 1 and not given.is_bool
    return Line((), line.slopes[dim]) if once and line is not None else None


def _line_through(given: FormCall, refs: Sequence[Ref], dim: int) -> Line | None:
    """The one line that parts along a dim are pieces of."""
    parts = [(given.forms[ref.name], tuple(given.specs[ref.name].shape)) for ref in refs]
    rank, start, whole = len(given.shape), 0, None
    for form, shape in parts:
        if not isinstance(form, Line):
            return None
        line = Line(padded(form.slopes, rank), form.offset)
        slope = line.slopes[dim] if shape[dim] > 1 or whole is None else whole.slopes[dim]
        slopes = (*line.slopes[:dim], slope, *line.slopes[dim + 1 :])
        begun = Line(slopes, line.offset - slope * start)
        if whole is not None and start == 1 and whole.slopes[dim] != slope:
            whole = Line(slopes, whole.offset)
        if whole is not None and whole != begun:
            return None
        whole, start = begun, start + shape[dim]
    return whole


# -- what computes ----------------------------------------------------------------------------------------


def _sum(sign: int) -> _Rule:
    def add(given: FormCall) -> Form | None:
        one, two = given.form("self"), given.form("other")
        if given.get("alpha", 1) != 1 or one is None or two is None:
            return None
        if isinstance(one, Line) and isinstance(two, Line):
            return one.plus(two, sign)
        return _each(one, two, operator.add if sign > 0 else operator.sub)

    return add


def _each(one: Form, two: Form, compute: Callable[[Number, Number], Number]) -> Form | None:
    """A choice with a number, one by one."""
    if isinstance(one, TwoNumbers) and isinstance(two, Line) and two.is_number:
        return one.of(lambda number: compute(number, two.offset))
    if isinstance(two, TwoNumbers) and isinstance(one, Line) and one.is_number:
        return two.of(lambda number: compute(one.offset, number))
    return None


def _reversed_difference(given: FormCall) -> Form | None:
    one, two = given.form("other"), given.form("self")
    if one is None or two is None or given.get("alpha", 1) != 1:
        return None
    if isinstance(one, Line) and isinstance(two, Line):
        return one.plus(two, -1)
    return _each(one, two, operator.sub)


def _product(given: FormCall) -> Form | None:
    one, two = given.form("self"), given.form("other")
    for line, other in ((one, two), (two, one)):
        if isinstance(line, Line) and line.is_number and isinstance(other, Line):
            whole = isinstance(line.offset, int) or other.is_number
            return other.times(line.offset) if whole else None
    if one is None or two is None:
        return None
    return _each(one, two, operator.mul) or _both(one, two)


def _both(one: Form, two: Form) -> Form | None:
    """One number where both choices are inside, 0 elsewhere: products and conjunctions."""
    if isinstance(one, TwoNumbers) and isinstance(two, TwoNumbers) and one.outside == two.outside == 0:
        return TwoNumbers((*one.lines, *two.lines), one.inside * two.inside, one.outside)
    return None


def _compared(lines: Callable[[Line], tuple[Line, ...]], compare: Callable[[Any, Any], bool]) -> _Rule:
    """`lines` are >= 0 where two integers, by their difference, compare so."""

    def rule(given: FormCall) -> Form | None:
        one, two = given.form("self"), given.form("other")
        if isinstance(one, Line) and isinstance(two, Line):
            if one.is_number and two.is_number:
                return Line((), compare(one.offset, two.offset))
            difference = one.plus(two, -1)
            whole = isinstance(difference.offset, int)
            return TwoNumbers(lines(difference), True, False) if whole else None
        return None if one is None or two is None else _each(one, two, compare)

    return rule


def _size(given: FormCall) -> LineSize | None:
    form = given.form("self")
    return LineSize(form) if isinstance(form, Line) and isinstance(form.offset, int) else None


def _of_sizes(rule: _Rule, *, less: int, inside: bool) -> _Rule:
    """A comparison that is `inside` where a size is at most a number, `less` so many; of others what a rule
    says."""

    def sized(given: FormCall) -> AnyForm | None:
        size, other = given.size("self"), given.form("other")
        if size is None or not isinstance(other, Line) or not other.is_number:
            return rule(given)
        limit = Line((), other.offset - less)
        lines = limit.plus(size.line, -1), limit.plus(size.line)
        return TwoNumbers(lines, inside, not inside) if isinstance(limit.offset, int) else None

    return sized


def _unequal(given: FormCall) -> Form | None:
    equal = _compared(lambda line: (line, line.times(-1)), operator.eq)(given)
    simple = equal and given.simple(equal)
    return None if simple is None or isinstance(simple, LineSize) else _not_of(simple)


def _shifted(line: Line) -> Line:
    return line.plus(Line((), -1))


def _truth(given: FormCall, name: str) -> Form | None:
    """Where an argument isn't zero; None for one of many numbers, and where the result is no truth value."""
    form = given.form(name)
    if not given.is_bool or form is None:
        return None
    if isinstance(form, TwoNumbers):
        return form.of(bool)
    return Line((), bool(form.offset)) if form.is_number else None


def _and(given: FormCall) -> Form | None:
    one, two = _truth(given, "self"), _truth(given, "other")
    if one is None or two is None:
        return None
    for line, other in ((one, two), (two, one)):
        if isinstance(line, Line):
            return other if line.offset else Line((), False)
    return _both(one, two)


def _or(given: FormCall) -> Form | None:
    one, two = _truth(given, "self"), _truth(given, "other")
    if one is None or two is None:
        return None
    for line, other in ((one, two), (two, one)):
        if isinstance(line, Line):
            return Line((), True) if line.offset else other
    return one if one == two else None


def _not_of(form: Form) -> Form | None:
    if isinstance(form, Line):
        return Line((), not form.offset)
    return form.of(operator.not_)


def _not(given: FormCall) -> Form | None:
    form = _truth(given, "self")
    return None if form is None else _not_of(form)


def _chosen(condition: Form | None, one: Form | None, other: Form | None) -> Form | None:
    """One number where a condition holds, another elsewhere; either may itself hold the other's number
    somewhere."""
    if condition is None or one is None or other is None:
        return None
    if isinstance(condition, Line):
        return None if not condition.is_number else one if condition.offset else other
    if not condition.inside:
        return _chosen(condition.of(operator.not_), other, one) if condition.outside else other
    if condition.outside:
        return one
    if not isinstance(other, Line) or not other.is_number:
        turned = complement(condition)
        one_number = isinstance(one, Line) and one.is_number
        return _chosen(TwoNumbers(turned.lines, True, False), other, one) if turned and one_number else None
    if isinstance(one, Line):
        return TwoNumbers(condition.lines, one.offset, other.offset) if one.is_number else None
    if one.outside == other.offset:
        return TwoNumbers((*condition.lines, *one.lines), one.inside, other.offset)
    turned = complement(one)
    if turned is not None and turned.outside == other.offset:
        return TwoNumbers((*condition.lines, *turned.lines), turned.inside, other.offset)
    return None


def _where(given: FormCall) -> Form | None:
    return _chosen(given.form("condition"), given.form("self"), given.form("other"))


def _filled(given: FormCall) -> Form | None:
    return _chosen(given.form("mask"), given.form("value"), given.form("self"))


def _triangle(sign: int) -> _Rule:
    """What triu (1) and tril (-1) leave: where sign (j - i - diagonal) >= 0."""

    def rule(given: FormCall) -> Form | None:
        line = Line((-sign, sign), -sign * given.get("diagonal", 0))
        return _chosen(TwoNumbers((line,), True, False), given.form("self"), Line((), 0))

    return rule


def _cumulated(given: FormCall) -> Form | None:
    form = given.form("self")
    return Line((), 0) if isinstance(form, Line) and form.is_number and form.offset == 0 else None


FORM_RULES: Mapping[str, _Rule] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _number(1)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _number(0)),
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _full),
    **dict.fromkeys(
        ("expand", "expand_as", "alias", "detach", "clone", "contiguous", "lift_fresh_copy"), _same
    ),
    **dict.fromkeys(("to", "_to_copy"), _cast),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "_unsafe_view"), _reshaped),
    **dict.fromkeys(("permute", "transpose", "t"), _permuted),
    "slice": _sliced,
    "select": _selected,
    **dict.fromkeys(("index_select", "gather"), _picked),
    "index": _indexed,
    "cat": _joined,
    "diff": _differences,
    "add": _sum(1),
    "sub": _sum(-1),
    "rsub": _reversed_difference,
    "mul": _product,
    "abs": _size,
    "ge": _of_sizes(_compared(lambda line: (line,), operator.ge), less=1, inside=False),
    "gt": _of_sizes(_compared(lambda line: (_shifted(line),), operator.gt), less=0, inside=False),
    "le": _of_sizes(_compared(lambda line: (line.times(-1),), operator.le), less=0, inside=True),
    "lt": _of_sizes(_compared(lambda line: (_shifted(line.times(-1)),), operator.lt), less=1, inside=True),
    "eq": _compared(lambda line: (line, line.times(-1)), operator.eq),
    "ne": _unequal,
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), _and),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), _or),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    "where": _where,
    "masked_fill": _filled,
    "tril": _triangle(-1),
    "triu": _triangle(1),
    "cumsum": _cumulated,
}
