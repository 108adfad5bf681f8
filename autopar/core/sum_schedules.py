"""Sums over P ranks as steps of messages; every rank begins with n bytes of its own and ends with the sum.

The n bytes are `parts` equal parts. In a step some ranks send some parts at the same time; who receives them
adds them to its own, or puts them in their place. What a rank has sent on it doesn't use again.

    steps             per rank, with n bytes      how
    nested rings      2 sum(s - 1)                a ring in each dim of a grid of ranks, one after the other;
                                                  with one dim the ring, with several hierarchical
    halving-doubling  2 log2 P                    half to the rank whose number differs in one bit, then a
                                                  quarter ...; ranks beyond a power of two are folded in first
    shifted           2 ceil(log2 P)              the same sizes to the rank d further on, d = ..., 4, 2, 1:
                                                  messages go one way around, and P may be any number
    tree              2 ceil(log2 P)              everything up a binomial tree, and down again
    fully connected   2                           a part to each other rank, and its sum to each

In all but the tree and the folded form the first half of the steps is a reduce-scatter, after which rank r
holds the sum of part r, and the second an all-gather.

Sources: Thakur, Rabenseifner and Gropp, 2005 (halving-doubling); Bruck et al., 1997 (shifts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import TypeAlias, assert_never

from autopar.core.topology import Topology, TopologyKind

Traffic: TypeAlias = tuple[tuple[int, int, int], ...]  # sender, receiver, number of parts


class SumAlgorithm(Enum):
    """The algorithms by the names that tables show."""

    RING = "ring"
    HIERARCHICAL = "hierarchical"
    HALVING = "halving-doubling"
    SHIFTED = "shifted halving-doubling"
    TREE = "tree"
    FULL = "fully connected"


@dataclass(frozen=True, slots=True)
class SumStep:
    """Messages at the same time: `parts_of` says which parts one sends another, added there or put there."""

    traffic: Traffic
    parts_of: Callable[[int, int], Iterable[int]]
    adds: bool


@dataclass(frozen=True, slots=True)
class SumSchedule:
    """Steps of a sum of so many parts; the first `scattered` of them are a reduce-scatter, 0 if none are."""

    parts: int
    steps: tuple[SumStep, ...]
    scattered: int


def schedule_of(algorithm: SumAlgorithm, ranks: int, topology: Topology | None = None) -> SumSchedule | None:
    """The steps of an algorithm; None where ranks can't be grouped. Groups follow the topology."""
    match algorithm:
        case SumAlgorithm.RING:
            return nested_rings((ranks,))
        case SumAlgorithm.HIERARCHICAL:
            sizes = grid(ranks, topology)
            return nested_rings(sizes) if len(sizes) > 1 else None
        case SumAlgorithm.HALVING:
            return halving_doubling(ranks)
        case SumAlgorithm.SHIFTED:
            return shifted(ranks)
        case SumAlgorithm.TREE:
            return tree(ranks)
        case SumAlgorithm.FULL:
            return fully_connected(ranks)
        case _:
            assert_never(algorithm)


def grid(ranks: int, topology: Topology | None) -> tuple[int, ...]:
    """Sizes of the groups of a hierarchical sum, the innermost first: the topology's, else nearly square."""
    if topology and math.prod(topology.sizes) == ranks and topology.sizes:
        inner_first = topology.kind is TopologyKind.FAT_TREE
        sizes = topology.sizes if inner_first else topology.sizes[::-1]
        return tuple(size for size in sizes if size > 1)
    inner = max(size for size in range(1, math.isqrt(ranks) + 1) if ranks % size == 0)
    return tuple(size for size in (inner, ranks // inner) if size > 1)


def nested_rings(sizes: tuple[int, ...]) -> SumSchedule:
    """A ring's reduce-scatter in each dim of a grid of ranks, then all-gathers in reverse order."""
    ranks = math.prod(sizes)
    scatters = [step for dim in range(len(sizes)) for step in _ring(sizes, dim, adds=True)]
    gathers = [step for dim in reversed(range(len(sizes))) for step in _ring(sizes, dim, adds=False)]
    return SumSchedule(ranks, (*scatters, *gathers), len(scatters))


def _ring(sizes: tuple[int, ...], dim: int, *, adds: bool) -> Iterator[SumStep]:
    """The steps of all rings along one dim; a rank holds parts whose numbers agree with its own below it."""
    stride, size, ranks = math.prod(sizes[:dim]), sizes[dim], math.prod(sizes)
    traffic = tuple((rank, _moved(rank, stride, size), ranks // (stride * size)) for rank in range(ranks))

    def parts_at(step: int) -> Callable[[int, int], Iterable[int]]:
        def parts(sender: int, receiver: int) -> Iterable[int]:
            index = (sender // stride - step - (1 if adds else 0)) % size
            return range(sender % stride + stride * index, ranks, stride * size)

        return parts

    for step in range(size - 1):
        yield SumStep(traffic, parts_at(step), adds)


def _moved(rank: int, stride: int, size: int) -> int:
    """The next rank of a ring."""
    index = rank // stride % size
    return rank + ((index + 1) % size - index) * stride


def halving_doubling(ranks: int) -> SumSchedule:
    """Recursive halving and doubling among the most ranks that are a power of two."""
    power = 1 << (ranks.bit_length() - 1)
    distances = [power >> place for place in range(1, power.bit_length())]

    def halves(distance: int, *, adds: bool) -> SumStep:
        traffic = tuple((rank, rank ^ distance, distance) for rank in range(power))

        def parts(sender: int, receiver: int) -> Iterable[int]:
            first = (receiver if adds else sender) // distance * distance
            return range(first, first + distance)

        return SumStep(traffic, parts, adds)

    steps = [halves(each, adds=True) for each in distances]
    steps += [halves(each, adds=False) for each in reversed(distances)]
    if power == ranks:
        return SumSchedule(power, tuple(steps), len(distances))
    outside = [(rank, rank - power) for rank in range(power, ranks)]
    fold = SumStep(tuple((*pair, power) for pair in outside), lambda *_: range(power), adds=True)
    back = tuple((inner, outer, power) for outer, inner in outside)
    return SumSchedule(power, (fold, *steps, SumStep(back, lambda *_: range(power), adds=False)), 0)


def shifted(ranks: int) -> SumSchedule:
    """Halving and doubling by shifts: rank r sends to r + d, and in the second half to r - d."""
    distances = [1 << place for place in range((ranks - 1).bit_length())]

    def shift(distance: int, *, adds: bool) -> SumStep:
        count, by = min(distance, ranks - distance), distance if adds else -distance
        traffic = tuple((rank, (rank + by) % ranks, count) for rank in range(ranks))

        def parts(sender: int, receiver: int) -> Iterable[int]:
            first = receiver if adds else sender
            return [(first + place) % ranks for place in range(count)]

        return SumStep(traffic, parts, adds)

    scatters = [shift(each, adds=True) for each in reversed(distances)]
    return SumSchedule(ranks, (*scatters, *(shift(each, adds=False) for each in distances)), len(scatters))


def tree(ranks: int) -> SumSchedule:
    """Everything up a binomial tree to rank 0, and down again."""
    distances = [1 << place for place in range((ranks - 1).bit_length())]
    pairs = [[(rank + d, rank) for rank in range(0, ranks - d, 2 * d)] for d in distances]
    up = [SumStep(tuple((*pair, 1) for pair in each), lambda *_: range(1), adds=True) for each in pairs]
    down = [
        SumStep(tuple((low, high, 1) for high, low in each), lambda *_: range(1), adds=False)
        for each in reversed(pairs)
    ]
    return SumSchedule(1, (*up, *down), 0)


def fully_connected(ranks: int) -> SumSchedule:
    """Each rank sends every other one its part, and then all others the sum of its own."""
    traffic = tuple((a, b, 1) for a, b in product(range(ranks), repeat=2) if a != b)
    scatter = SumStep(traffic, lambda sender, receiver: (receiver,), adds=True)
    return SumSchedule(ranks, (scatter, SumStep(traffic, lambda sender, receiver: (sender,), adds=False)), 1)
