"""The median of paired ratios and its interval, without assumptions about the noise.

Of n independent ratios, sorted, the k-th and the (n + 1 - k)-th enclose the median with probability
1 - 2 P(Binomial(n, 1/2) < k), whatever they are distributed like.
Source: Conover, Practical Nonparametric Statistics, 1999, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95  # at least


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios; `low` and `high` enclose it with at least `CONFIDENCE`."""

    median: float
    low: float
    high: float


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of `ours[i] / theirs[i]`, which were timed one right after the other."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    rank = order(len(ratios))
    return Ratio(median(ratios), ratios[rank - 1], ratios[-rank])


def order(count: int) -> int:
    """The largest k whose interval still has the confidence; 1 where even the whole range has less."""
    tail, rank = 0.0, 0
    while tail <= (1 - CONFIDENCE) / 2:
        tail += math.comb(count, rank) / 2**count
        rank += 1
    return max(1, rank - 1)
