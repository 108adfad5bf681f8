"""Which rows of a sharded dim each rank owns: a cut is the vector of boundaries.

    length 10 on 4 ranks      balanced  0   3   6   8   10      as equal as can be
                              chunked   0   3   6   9   10      torch.chunk's, all that DTensor knows

Several axes may split one dim, the major one first; the parts of a part are cut again by the same
rule, so that giving an axis more or fewer of the minor axes never moves a major boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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


def nested(length: int, sizes: Sequence[int], rule: Rule, unit: int = 1) -> Cut:
    """The boundaries of prod(sizes) parts, cut by sizes[0] first, in multiples of `unit` rows."""
    pieces = [(0, -(-length // unit))]
    for size in sizes:
        pieces = [
            (start + low, start + high)
            for start, stop in pieces
            for low, high in _pairs(rule(stop - start, size))
        ]
    return tuple(min(start * unit, length) for start, _ in pieces) + (length,)


def has_empty(cut: Cut) -> bool:
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
