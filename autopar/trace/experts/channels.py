"""Which channels of an expert's weights, rows and result are one loop: what may be split inside of experts.

    y = product(x, w1); z = silu(part 0 of 2 of y) * part 1 of 2 of y; product(z, w2)

    x.1 ~ w1.1        w1.2 ~ (2, w2.1)        w2.2 ~ result.1

A *class* is all values whose columns are the same loop. Each of its terms says how a dim of an operand or the
result runs through that loop: with other loops outside and inside of it, or by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import networkx as nx

from autopar.trace.experts.body import CALL, EVERY, PART, PICK, PRODUCT, ExpertBody, read_body

RESULT = -1  # the result's place among operands


@dataclass(frozen=True, slots=True)
class ChannelTerm:
    """A dim of an operand: `outer` x the class's loop x `inner`."""

    operand: int
    dim: int
    outer: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        return not self.outer and not self.inner


@dataclass(frozen=True, slots=True)
class ChannelClasses:
    """The class of each value of a body, weights None, and the terms of each class."""

    of: tuple[int | None, ...]
    terms: tuple[tuple[ChannelTerm, ...], ...]

    def plain(self, value: int) -> ChannelTerm | None:
        """A dim that is the loop of a value's columns, and nothing else."""
        number = self.of[value]
        return None if number is None else next((term for term in self.terms[number] if term.is_plain), None)


@lru_cache(maxsize=1024)
def channel_classes(text: str, rows: int, widths: tuple[tuple[int, ...], ...]) -> ChannelClasses:
    """The classes of a body of so many row tensors; `widths` are its operands' shapes without their first
    dims."""
    return _Walk(read_body(text), rows, widths).run()


class _Walk:
    def __init__(self, body: ExpertBody, rows: int, widths: Sequence[tuple[int, ...]]) -> None:
        self.body, self.rows, self.shapes = body, rows, widths
        self.alike: Any = nx.utils.UnionFind()
        self.own: dict[int, list[ChannelTerm]] = {}  # terms by value
        self.parts: dict[int, tuple[int, str, int]] = {}  # of which value a value is a part, of how many
        self.width = {number: shape[-1] for number, shape in enumerate(widths[:rows])}

    def run(self) -> ChannelClasses:
        for number in range(self.rows):
            self.add(number, ChannelTerm(number, 1))
        for number, step in enumerate(self.body.steps, start=len(self.shapes)):
            self.step(number, step.kind, step.values, step.count)
        last = len(self.shapes) + len(self.body.steps) - 1
        self.add(last, ChannelTerm(RESULT, 1))
        roots = list(dict.fromkeys(self.alike[value] for value in self.own))
        numbers = {root: place for place, root in enumerate(roots)}
        of = [numbers[self.alike[value]] if value in self.own else None for value in range(last + 1)]
        return ChannelClasses(tuple(of), tuple(tuple(dict.fromkeys(self.terms(root))) for root in roots))

    def add(self, value: int, *terms: ChannelTerm) -> None:
        self.own.setdefault(value, []).extend(terms)
        self.alike[value]

    def step(self, number: int, kind: str, values: Sequence[int], count: int) -> None:
        if kind == PRODUCT:
            x, w = values
            self.add(x, ChannelTerm(w, 1))
            self.add(number, ChannelTerm(w, 2))
            self.width[number] = self.shapes[w][-1]
        elif kind == PICK:
            self.add(number, ChannelTerm(values[0], 1))
            self.width[number] = self.shapes[values[0]][-1]
        elif kind in (PART, EVERY):
            self.add(number)
            self.parts[number] = values[0], kind, count
            self.width[number] = self.width[values[0]] // count
        else:
            assert kind == CALL
            self.add(number)
            self.width[number] = max(self.width[value] for value in values)
            for value in values:
                if self.width[value] == self.width[number]:
                    self.alike.union(number, value)

    def terms(self, root: int) -> Iterator[ChannelTerm]:
        """The terms of a class: its values' own, and those of what they are parts of."""
        for value in sorted(self.own):
            if self.alike[value] != root:
                continue
            yield from self.own[value]
            if value in self.parts:
                whole, kind, count = self.parts[value]
                for term in self.terms(self.alike[whole]):
                    if kind == PART:
                        yield replace(term, outer=(*term.outer, count))
                    else:
                        yield replace(term, inner=(count, *term.inner))
