"""Which parts of a graph are computed again in backward, so that little is kept in between.

    k_i     bytes that operator i keeps for its backward pass
    c_p     bytes that cross position p: made before operator p, used by it or by later ones
    L       the most that one part may keep: it is all there when backward recomputes that part

With every part recomputed, what stays is what crosses the cuts, and at the peak one part's own bytes:

    minimise  sum of c_p over the cuts + max over parts of the sum of k_i

For each L of a grid the first term is a shortest path over positions; the best L wins. On a chain of n
equal layers that gives about sqrt(n) parts. Source: Chen et al., 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Segment = tuple[int, int]  # operators [first, stop)
GRID = 16  # values of L, each a little less than 3/4 of the one before


def segments(kept: Sequence[int], crossing: Sequence[int]) -> tuple[Segment, ...]:
    """The parts, in order, that cover all operators; a part of one operator gains nothing and is left out."""
    total = sum(kept)
    best: tuple[int, list[int]] | None = None
    for exponent in range(GRID):
        found = _path(kept, crossing, total * 0.72**exponent)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None or best[0] >= total:
        return ()
    return tuple((first, stop) for first, stop in pairwise(best[1]) if stop - first > 1)


def _path(kept: Sequence[int], crossing: Sequence[int], limit: float) -> tuple[int, list[int]] | None:
    """(bytes, bounds) of the cheapest cut into parts that keep at most `limit` each."""
    count = len(kept)
    done = [0, *accumulate(kept)]
    cost: list[float] = [0.0] + [float("inf")] * count
    come = [0] * (count + 1)
    for stop in range(1, count + 1):
        for first in range(stop - 1, -1, -1):
            if done[stop] - done[first] > limit:
                break
            price = cost[first] + (crossing[first] if first else 0)
            if price < cost[stop]:
                cost[stop], come[stop] = price, first
    if cost[count] == float("inf"):
        return None
    bounds = [count]
    while bounds[-1]:
        bounds.append(come[bounds[-1]])
    bounds.reverse()
    most = max(done[stop] - done[first] for first, stop in pairwise(bounds))
    return int(cost[count]) + most, bounds
