"""Graphs of micro-batches that needn't be traced: two traced ones tell the others.

A graph is a function of the number of samples n. Where the traces of a and of b samples have the same
operators, every size in them is taken to be affine:

    x(n) = x(a) + (x(b) - x(a)) (n - a) / (b - a)

What is no whole number then, other numbers that differ, and constants as long as the batch ask for a trace;
so does a single sample, which operators treat in ways of their own. A model may compute something else for
some n: choices are compared on told graphs, and the one that is chosen is traced after all (`stands`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from autopar.core.graph import Graph, GraphInput, Operator, ProcessNumber, TensorSpec
from autopar.errors import InputError, TraceError

Line: TypeAlias = Callable[[int, int], int]  # the size that those in two graphs tell


class _UnlikeError(Exception):
    """Two graphs that don't tell others."""


@dataclass(slots=True)
class PartGraphs:
    """The graph of one of `count` micro-batches of `size` samples, traced by `trace` unless it can be told;
    `whole` makes that of the batch as its only part."""

    trace: Callable[[int], Graph]
    whole: Callable[[], Graph]
    size: int
    tells: bool = True
    told: dict[int, Graph] = field(default_factory=dict)
    traced: dict[int, Graph] = field(default_factory=dict)  # by samples

    def __call__(self, count: int) -> Graph:
        samples = self.size // count
        if samples in self.traced:
            return self.traced[samples]
        if count not in self.told:
            graph = self.tell(samples) if self.tells and self.size % count == 0 else None
            if graph is None:
                self.traced[samples] = graph = self.trace(count)
                return graph
            self.told[count] = graph
        return self.told[count]

    def tell(self, samples: int) -> Graph | None:
        """The graph of so many samples, if traced ones tell it."""
        if samples == 1 or not any(1 < each < self.size for each in self.traced):
            return None
        if self.size not in self.traced:
            self.traced[self.size] = self.whole()
        nearest = min((each for each in self.traced if 1 < each < self.size), key=lambda n: abs(n - samples))
        return told(self.traced[nearest], nearest, self.traced[self.size], self.size, samples)

    def stands(self, count: int) -> bool:
        """Whether a trace of `count` micro-batches gives the graph that was told. If not, all told graphs are
        dropped and traced anew."""
        if count not in self.told:
            return True
        with contextlib.suppress(InputError, TraceError):  # which are raised again when it is asked for
            self.traced[self.size // count] = graph = self.trace(count)
            if graph == self.told[count]:
                del self.told[count]
                return True
        self.tells = False
        self.told.clear()
        return False


def told(less: Graph, a: int, more: Graph, b: int, samples: int) -> Graph | None:
    """The graph of so many `samples`; None if those of a and b don't tell it."""

    def line(low: int, high: int) -> int:
        product = (high - low) * (samples - a)
        size = low + product // (b - a)
        if product % (b - a) or size * low < 0 or not size:
            raise _UnlikeError
        return size

    alike = (
        [item.name for item in less.inputs] == [item.name for item in more.inputs],
        less.specs.keys() == more.specs.keys(),
        len(less.operators) == len(more.operators),
        (less.outputs, less.writes, less.loss) == (more.outputs, more.writes, more.loss),
    )
    if not all(alike):
        return None
    try:
        specs = _specs(less.specs, more.specs, line)
        operators = [
            _operator(mine, theirs, line) for mine, theirs in zip(less.operators, more.operators, strict=True)
        ]
        inputs = [_input(item, specs[item.name]) for item in less.inputs]
    except _UnlikeError:
        return None
    return replace(less, inputs=tuple(inputs), operators=tuple(operators), specs=specs)


def _specs(
    less: Mapping[str, TensorSpec], more: Mapping[str, TensorSpec], line: Line
) -> dict[str, TensorSpec]:
    found = {}
    for name, spec in less.items():
        other = more[name]
        if spec != other:
            if replace(spec, shape=other.shape) != other:
                raise _UnlikeError
            spec = replace(spec, shape=_tree(spec.shape, other.shape, line))
        found[name] = spec
    return found


def _input(item: GraphInput, spec: TensorSpec) -> GraphInput:
    if item.spec == spec:
        return item
    if item.value is not None:
        raise _UnlikeError  # as long as the batch
    return replace(item, spec=spec)


def _operator(less: Operator, more: Operator, line: Line) -> Operator:
    if less == more:
        return less
    found = replace(
        less, args=_tree(less.args, more.args, line), kwargs=_tree(less.kwargs, more.kwargs, line)
    )
    if replace(less, args=more.args, kwargs=more.kwargs) != more:
        raise _UnlikeError
    return found


def _tree(less: Any, more: Any, line: Line) -> Any:
    """The arguments that those in two graphs tell."""
    if type(less) is not type(more):
        raise _UnlikeError
    match less:
        case tuple() | list() if len(less) == len(more):
            return type(less)(_tree(mine, theirs, line) for mine, theirs in zip(less, more, strict=True))
        case dict() if less.keys() == more.keys():
            return {key: _tree(mine, more[key], line) for key, mine in less.items()}
        case int() if not isinstance(less, bool | ProcessNumber):
            return less if less == more else line(less, more)
    if isinstance(less, tuple | list | dict) or less != more:
        raise _UnlikeError
    return less
