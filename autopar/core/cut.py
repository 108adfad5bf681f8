"""Which rows of a sharded dim each rank owns: a cut is the vector of boundaries.

    length 10 on 4 ranks      balanced  0   3   6   8   10      as equal as can be
                              chunked   0   3   6   9   10      torch.chunk's, all that DTensor knows
              shares 1:1:2:4  by_shares 0   1   2   5   10      as soon done as can be

Several axes may split one dim, the major one first; the parts of a part are cut again by the same
rule, so that giving an axis more or fewer of the minor axes never moves a major boundary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

Cut = tuple[int, ...]
Rule = Callable[[int, int], Cut]


def balanced(length: int, parts: int) -> Cut:
    """Boundaries whose parts differ by at most one row, the longer ones first."""
    short, longer = divmod(length, parts)
    return tuple(index * short + min(index, longer) for index in range(parts + 1))


def chunked(length: int, parts: int) -> Cut:
    """The boundaries of `torch.chunk`; the last parts may be empty."""
    size = -(-length // parts)
    return tuple(min(index * size, length) for index in range(parts + 1))


def nested(length: int, sizes: Sequence[int], rule: Rule) -> Cut:
    """The boundaries of prod(sizes) parts, cut by sizes[0] first."""
    pieces = [(0, length)]
    for size in sizes:
        pieces = [
            (start + low, start + high)
            for start, stop in pieces
            for low, high in _pairs(rule(stop - start, size))
        ]
    return tuple(start for start, _ in pieces) + (length,)


def aligned(length: int, sizes: Sequence[int], unit: int) -> Cut:
    """Nested balanced boundaries in multiples of `unit` rows.

    The last unit may be a short one, so here the parts with more units come last.

        length 10, unit 4 (4 + 4 + 2), 2 parts      (0, 4, 10), not (0, 8, 10)
    """
    units = nested(-(-length // unit), sizes, _longer_last)
    return tuple(min(bound * unit, length) for bound in units)


def by_shares(length: int, shares: Sequence[Sequence[int]], unit: int = 1) -> Cut:
    """Boundaries in multiples of `unit` rows by the shares of each axis, cut by shares[0] first."""
    pieces = [(0, -(-length // unit))]
    for each in shares:
        pieces = [
            (start + low, start + high)
            for start, stop in pieces
            for low, high in _pairs(_proportional(stop - start, each))
        ]
    return tuple(min(start * unit, length) for start, _ in pieces) + (length,)


def _proportional(length: int, shares: Sequence[int]) -> Cut:
    """The boundaries of which the most rows for a share are fewest; no part is empty if there are enough
    rows. Rows are handed one by one to the part that has then least for its share, the first of such."""
    total = sum(shares)
    least = 1 if length >= len(shares) else 0
    rows = [max(least, length * share // total) for share in shares]
    while sum(rows) > length:
        longer = (index for index, count in enumerate(rows) if count > least)
        rows[max(longer, key=lambda index: Fraction(rows[index], shares[index]))] -= 1
    waiting = [(Fraction(rows[index] + 1, share), index) for index, share in enumerate(shares)]
    heapq.heapify(waiting)
    for _ in range(length - sum(rows)):
        _, index = waiting[0]
        rows[index] += 1
        heapq.heapreplace(waiting, (Fraction(rows[index] + 1, shares[index]), index))
    return (0, *accumulate(rows))


def most_for_a_share(cut: Cut, shares: Sequence[int]) -> float:
    """Most rows that a part has for its share, where all shares together are as many as the parts: `longest`,
    where these are equal."""
    mean = sum(shares) / len(shares)
    return max((high - low) * mean / share for (low, high), share in zip(_pairs(cut), shares, strict=True))


def longest(cut: Cut) -> int:
    """Rows of the longest part: the rank that the others wait for."""
    return max(high - low for low, high in _pairs(cut))


@lru_cache(maxsize=4096)
def longest_place(cut: Cut) -> int:
    """The number of a longest part: the first with neighbours on both sides, if there is one."""
    rows = longest(cut)
    places = [place for place, (low, high) in enumerate(_pairs(cut)) if high - low == rows]
    return next((place for place in places if 0 < place < len(cut) - 2), places[0])


def _longer_last(length: int, parts: int) -> Cut:
    return tuple(length - bound for bound in reversed(balanced(length, parts)))


def has_empty(cut: Cut) -> bool:
    """Whether some part has no rows."""
    return any(high <= low for low, high in _pairs(cut))


def part(cut: Cut, sizes: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """Rows [start, stop) of the part at `coordinate`; fewer coordinates than sizes give the
    union of the parts below."""
    start, span = 0, math.prod(sizes)
    for size, index in zip(sizes, coordinate, strict=False):
        span //= size
        start += index * span
    return cut[start], cut[start + span]


def _pairs(cut: Cut) -> list[tuple[int, int]]:
    return list(zip(cut, cut[1:], strict=False))
