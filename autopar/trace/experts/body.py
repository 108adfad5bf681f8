"""What an expert does to its rows, as text that an operator can carry.

    y = product(x, w1); silu(part 0 of 2 of y) * part 1 of 2 of y; product(.., w2)

    [["product", 0, 1], ["part", 3, 0, 2], ["part", 3, 1, 2], ["call", "silu.default", ...], ...]

Values are numbered: row tensors, then weights, each with a matrix or vector for each expert, then the result
of each step; the last one's is the body's. No step says a size, so that a body is the same for parts of rows,
of experts and of channels.

    product x w     each row of x times the matrix of its expert
    pick w          for each row the vector of its expert
    part x j n      of n runs of columns the one with number j
    every x j n     columns j, j + n, j + 2 n, ...
    call            an ATen operator that is elementwise; dtypes stand in a list of their own, by number
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
PRODUCT, PICK, PART, EVERY, CALL = "product", "pick", "part", "every", "call"
_VALUE, _DTYPE = "value", "dtype"  # keys of what stands for a value and for a dtype


@dataclass(frozen=True, slots=True)
class BodyValue:
    """A value of a body, by number, among the arguments of a call."""

    number: int


@dataclass(frozen=True, slots=True)
class BodyDtype:
    """A dtype among the arguments of a call, by its number in the operator's list."""

    number: int


@dataclass(frozen=True, slots=True)
class BodyStep:
    """One step: its kind, the values that it takes, and numbers; of a call the overload and its arguments."""

    kind: str
    values: tuple[int, ...]
    place: int = 0
    count: int = 1
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def arguments(self, values: Sequence[Any], dtypes: Sequence[torch.dtype]) -> tuple[Any, dict[str, Any]]:
        """The call's arguments with what `values` has in the places of its values."""
        return _filled(self.args, values, dtypes), _filled(dict(self.kwargs or {}), values, dtypes)


Product = Callable[[Tensor, Tensor], Tensor]
Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertBody:
    """The steps of an expert."""

    steps: tuple[BodyStep, ...]

    def run(
        self, values: Sequence[Tensor], dtypes: Sequence[torch.dtype], *, product: Product, pick: Pick
    ) -> Tensor:
        """What the steps give for row tensors and weights, in this order; the callers say how rows meet
        weights."""
        known = list(values)
        for step in self.steps:
            first, *others = (known[number] for number in step.values)
            match step.kind:
                case "product":
                    known.append(product(first, *others))
                case "pick":
                    known.append(pick(first))
                case "part" | "every":
                    known.append(columns(first, step))
                case _:
                    args, kwargs = step.arguments(known, dtypes)
                    known.append(step.target(*args, **kwargs))
        return known[-1]


def columns(x: Tensor, step: BodyStep) -> Tensor:
    """The columns that a step takes of a value."""
    found: Tensor
    if step.kind == PART:
        found = x.chunk(step.count, -1)[step.place]
    else:
        found = aten.slice.Tensor(x, -1, step.place, x.shape[-1], step.count)
    return found


def write_body(steps: Sequence[BodyStep]) -> str | None:
    """The text of a body; None if arguments of its calls are none that a text can hold."""
    try:
        return json.dumps([_written(step) for step in steps], separators=(",", ":"))
    except TypeError:
        return None


def _written(step: BodyStep) -> list[Any]:
    if step.kind != CALL:
        numbers = [step.place, step.count] if step.kind in (PART, EVERY) else []
        return [step.kind, *step.values, *numbers]
    name = str(step.target).removeprefix("aten.")
    return [CALL, name, _plain(step.args), _plain(dict(step.kwargs or {}))]


def _plain(tree: Any) -> Any:
    match tree:
        case BodyValue(number):
            return {_VALUE: number}
        case BodyDtype(number):
            return {_DTYPE: number}
        case tuple() | list():
            return [_plain(item) for item in tree]
        case dict():
            return {"kwargs": {name: _plain(item) for name, item in tree.items()}}
        case _:
            return tree


@lru_cache(maxsize=1024)
def read_body(text: str) -> ExpertBody:
    """The body of a text."""
    return ExpertBody(tuple(_read(*item) for item in json.loads(text)))


def _read(kind: str, *rest: Any) -> BodyStep:
    if kind == CALL:
        name, args, kwargs = rest
        packet, _, overload = name.partition(".")
        taken, named = _from_plain(args), _from_plain(kwargs)
        values = tuple(value.number for value in _values((taken, named)))
        target = getattr(getattr(aten, packet), overload)
        return BodyStep(CALL, values, target=target, args=tuple(taken), kwargs=named)
    if kind in (PART, EVERY):
        value, place, count = rest
        return BodyStep(kind, (value,), place, count)
    return BodyStep(kind, tuple(rest))


def _from_plain(tree: Any) -> Any:
    match tree:
        case list():
            return [_from_plain(item) for item in tree]
        case {"value": number}:
            return BodyValue(number)
        case {"dtype": number}:
            return BodyDtype(number)
        case {"kwargs": named}:
            return {name: _from_plain(item) for name, item in named.items()}
        case _:
            return tree


def _values(tree: Any) -> Iterator[BodyValue]:
    match tree:
        case BodyValue():
            yield tree
        case tuple() | list():
            for item in tree:
                yield from _values(item)
        case dict():
            for item in tree.values():
                yield from _values(item)


def _filled(tree: Any, values: Sequence[Any], dtypes: Sequence[torch.dtype]) -> Any:
    match tree:
        case BodyValue(number):
            return values[number]
        case BodyDtype(number):
            return dtypes[number]
        case tuple() | list():
            return type(tree)(_filled(item, values, dtypes) for item in tree)
        case dict():
            return {name: _filled(item, values, dtypes) for name, item in tree.items()}
        case _:
            return tree
