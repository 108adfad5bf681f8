"""Cases of disturbed runs that cover every pair of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

MOMENTS = ("import", "planning", "forward", "backward", "sums", "optimizer", "save", "load", "between")
FAULTS = ("kill", "stop", "exception", "memory", "launcher")
RANKS = (2, 4)
STAGES = (1, 2)
LAUNCHERS = ("autopar", "torchrun")


class Case(NamedTuple):
    """One disturbed run."""

    moment: str
    fault: str
    ranks: int
    stages: int
    launcher: str

    def __str__(self) -> str:
        return f"{self.moment:9} {self.fault:9} {self.ranks} ranks, {self.stages} stages, {self.launcher}"


VALUES: tuple[Sequence[object], ...] = (MOMENTS, FAULTS, RANKS, STAGES, LAUNCHERS)


def pairs_of(case: Case) -> frozenset[tuple[int, object, int, object]]:
    """Pairs of values in a case, each with its place."""
    return frozenset((i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2))


def covering() -> Iterator[Case]:
    """Yield cases until all pairs are in one: each time one with the most that are new."""
    every = [Case(*values) for values in product(*VALUES)]  # type: ignore[arg-type]
    pairs = {case: pairs_of(case) for case in every}
    left = frozenset().union(*pairs.values())
    while left:
        case = max(every, key=lambda case: len(pairs[case] & left))
        left -= pairs[case]
        yield case
