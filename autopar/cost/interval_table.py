"""Tables over all runs [p, q) of a graph's operators, between places where one may begin or end.

    places      0    3    7       12    15        the ends of the graph among them
    [p, q]           |-- a run --|                from the operator at place p to the one before place q

What a run pays for one of its operators is the same in a rectangle of the table: for operator u, begun
after operator a, all p in (a, u] and q > u. Rectangles are added at their corners and summed up once, so
that all n^2 runs cost as much as reading the graph and writing the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]  # [p, q]: 0 where q <= p
Row = NDArray[np.float64]  # [p]


class Rectangles:
    """A table as the sum of rectangles, of which only the corners are written."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = np.asarray(places)
        self.corners: list[tuple[int, int, int, float]] = []

    def add(self, after: int, user: int, amount: float) -> None:
        """`amount` in every stage that begins after operator `after` and has operator `user`."""
        if amount:
            self.corners.append((after, user, user, amount))

    def add_each(self, users: Sequence[int], amount: float) -> None:
        """`amount` once in every stage that has one of `users`, which are in order."""
        for before, user in pairwise((-1, *users)):
            self.add(before, user, amount)

    def add_first(self, maker: int, user: int, amount: float) -> None:
        """Add `amount` to every stage that has both operators, `maker` and then `user`."""
        if amount:
            self.corners.append((-1, maker, user, amount))

    def total(self) -> Table:
        """The table; stages that end where they begin, or before, are 0."""
        size = len(self.places)
        table = np.zeros((size + 1, size))
        if self.corners:
            after, last, user, amount = map(np.asarray, zip(*self.corners, strict=True))
            low = np.searchsorted(self.places, after, side="right")
            high = np.searchsorted(self.places, last, side="right")  # the first cut behind `last`
            ends = np.searchsorted(self.places, user, side="right")
            np.add.at(table, (low, ends), amount)
            np.add.at(table, (high, ends), -amount)
        summed = np.cumsum(np.cumsum(table, axis=0), axis=1)[:-1]
        return np.triu(summed.clip(min=0.0), 1)  # corners cancel but for rounding
