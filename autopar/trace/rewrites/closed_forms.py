"""What a tensor of numbers holds, in closed form, by how a graph makes it: at any length, never by its bytes.

    line      offset + sum_d slope_d index_d                arange(s)[:, None] - 3        i - 3
    choice    one number where lines are all >= 0,          arange(s) <= arange(s)[:, None]
              another number elsewhere                                     True where i - j >= 0, else False
    size      the absolute value of a line of integers                     |i - j|, which a window compares

A line without slopes is one number everywhere. Lines that are >= 0 at all indices of a tensor say nothing,
and one that never is leaves the other number. Whatever is made otherwise has no form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

HIDDEN = torch.finfo(torch.float16).min  # added to a score, leaves it a weight of exactly zero
Number: TypeAlias = float | int | bool


@dataclass(frozen=True, slots=True)
class Line:
    """offset + the sum of slope times index, over the dims of a tensor."""

    slopes: tuple[int, ...]
    offset: Number

    @property
    def is_number(self) -> bool:
        return not any(self.slopes)

    @property
    def key(self) -> tuple[tuple[int, ...], Number]:
        """Slopes without the leading zeros of dims that others lack."""
        first = next((place for place, slope in enumerate(self.slopes) if slope), len(self.slopes))
        return self.slopes[first:], self.offset

    def plus(self, other: Line, sign: int = 1) -> Line:
        """The sum of two lines, or their difference; dims are aligned at the last."""
        rank = max(len(self.slopes), len(other.slopes))
        one, two = (padded(each.slopes, rank) for each in (self, other))
        slopes = tuple(a + sign * b for a, b in zip(one, two, strict=True))
        return Line(slopes, self.offset + sign * other.offset)

    def times(self, factor: Number) -> Line:
        slopes = tuple(int(factor * slope) if slope else 0 for slope in self.slopes)
        return Line(slopes, self.offset * factor)

    @property
    def reduced(self) -> Line:
        """The line of the smallest slopes that is >= 0 at the same integers."""
        factor = math.gcd(*self.slopes) or 1
        return Line(tuple(slope // factor for slope in self.slopes), self.offset // factor)

    def least(self, shape: Sequence[int]) -> Number:
        """The least value over a tensor of that shape."""
        sizes = shape[len(shape) - len(self.slopes) :]
        return self.offset + sum(min(0, a * (size - 1)) for a, size in zip(self.slopes, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class TwoNumbers:
    """`inside` where all `lines`, of integers, are >= 0, else `outside`."""

    lines: tuple[Line, ...]
    inside: Number
    outside: Number

    def of(self, change: Callable[[Number], Number]) -> TwoNumbers:
        return TwoNumbers(self.lines, change(self.inside), change(self.outside))


@dataclass(frozen=True, slots=True)
class LineSize:
    """The absolute value of a line of integers; only comparisons with a number make something of it."""

    line: Line


Form: TypeAlias = Line | TwoNumbers
AnyForm: TypeAlias = Form | LineSize


def padded(slopes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Slopes of a tensor of `rank` dims, of which those that are there are the last."""
    return (0,) * (rank - len(slopes)) + slopes


def complement(form: TwoNumbers) -> TwoNumbers | None:
    """The choice by the line that is >= 0 elsewhere, if there is one: of integers -line - 1."""
    if len(form.lines) > 1:
        return None
    return TwoNumbers((form.lines[0].times(-1).plus(Line((), -1)),), form.outside, form.inside)
