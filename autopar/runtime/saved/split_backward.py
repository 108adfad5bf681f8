"""What autograd keeps between the halves of a split backward: what gradients of weights need.

    forward            x --> linear --> relu --> linear --> y        saved: x, which were positive, h
    first half         gradients of inputs come through all three; of relu's nothing is wanted any more
    second half        gradients of weights are made of x and h

Torch keeps the whole graph until the second half. Here each saved tensor lies in a box. In the first half
a box is emptied as soon as what has read it has run, unless a weight hangs on that: is reached from it by a
way on which nothing depends on what the stage received. Boxes of what is recomputed are filled when the
first of them is opened (recompute.py): in the first half, for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from autopar.torch_seams.autograd import current_node

T = TypeVar("T")


@dataclass(slots=True)
class Box(Generic[T]):
    """A saved value; None once it is of no use. A value that can be made anew lies there for a first half
    alone, and `then` is the way to it."""

    saved: T | None
    then: T | None = None


@dataclass(slots=True)
class Between:
    """The boxes of a stage, whose micro-batches' backwards are halved one after the other."""

    _graph: _Graph | None = None  # in a first half
    _node: Any = None  # of autograd, which runs
    _read: list[Box[Any]] = field(default_factory=list)  # by it, and wanted by nobody else

    @contextmanager
    def first_half(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """While gradients of inputs are made, those of `weights` being left for later."""
        self._graph = _Graph({id(weight) for weight in weights})
        try:
            yield
        finally:
            self._empty()
            self._graph = self._node = None

    def open(self, box: Box[T]) -> T:
        """The content of the box, for the part of autograd's graph that runs."""
        if self._graph is not None:
            node = current_node()
            if node is not self._node:
                self._empty()
                self._node = node
            if node is not None and (box.then is not None or not self._graph.has_weight(node)):
                self._read.append(box)
        assert box.saved is not None, "what a first half has read for the last time"
        return box.saved

    def _empty(self) -> None:
        for box in self._read:
            box.saved, box.then = box.then, None
        self._read.clear()


halved: ContextVar[Between | None] = ContextVar(
    "the stage that runs, if its backward is halved", default=None
)


@dataclass(slots=True)
class _Graph:
    """Autograd's graph as far as it was asked for; leaves that learn are known by their `id`."""

    learned: set[int]
    found: dict[Any, tuple[bool, bool]] = field(default_factory=dict)  # see `reached`

    def has_weight(self, node: Any) -> bool:
        """Whether a next node of `node` leads to weights alone."""
        self.reached(node)
        return any(self.found[each] == (False, True) for each in _next(node))

    def reached(self, node: Any) -> tuple[bool, bool]:
        """Which leaves are reached from `node`: (other than weights, weights)."""
        waiting = [node]
        while waiting:
            last = waiting[-1]
            behind = [each for each in _next(last) if each not in self.found]
            if last not in self.found and behind:
                waiting += behind
                continue
            waiting.pop()
            if last not in self.found:
                self.found[last] = self._leaf(last) or self._joined(last)
        return self.found[node]

    def _leaf(self, node: Any) -> tuple[bool, bool] | None:
        leaf = getattr(node, "variable", None)
        if leaf is None:
            return None
        learned = id(leaf) in self.learned
        return not learned, learned

    def _joined(self, node: Any) -> tuple[bool, bool]:
        onward = [self.found[each] for each in _next(node)]
        return any(other for other, _ in onward), any(weight for _, weight in onward)


def _next(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]
