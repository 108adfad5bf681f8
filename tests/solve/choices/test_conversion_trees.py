"""Conversions along a tree are the cheapest of all sets of moves that reach every use."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.convert.network import Network, paths, priced
from autopar.core.placement import B, P, R, Shard
from autopar.solve.choices.conversion_trees import cheapest_tree, tree_seconds

PLACEMENTS = ((R, P, B, Shard(0)), (R, Shard(0)))


def network_of(seed: int, share: float) -> Network:
    """One with costs at random, many of them equal, and some moves left out."""
    random = np.random.default_rng(seed)
    unpriced = paths(PLACEMENTS, (), (True,) * 8)
    seconds = random.integers(0, 4, len(unpriced.source)).astype(np.float64)
    seconds[random.random(len(seconds)) > share] = np.inf
    return priced(unpriced, seconds, seconds)


def brute(network: Network, source: int, needs: list[int]) -> float:
    """The least, by all nodes at which a tree may split: chains of ways between these."""
    count = len(network.layouts)
    far = np.full((count, count), np.inf)
    np.fill_diagonal(far, 0.0)
    for start, end, seconds in zip(network.source, network.target, network.seconds, strict=True):
        far[start, end] = min(far[start, end], seconds)
    for middle in range(count):
        far = np.minimum(far, far[:, middle, None] + far[None, middle])
    best = np.inf
    for order in itertools.permutations(needs):
        one, two, three = (*order, order[-1], order[-1])[:3]
        for first, second in itertools.product(range(count), repeat=2):
            stem = far[source, first] + far[first, one] + far[first, second]
            best = min(best, float(stem + far[second, two] + far[second, three]))
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9999),
    st.floats(0.3, 1),
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.integers(0, 7),
)
def test_a_tree_is_the_cheapest_of_all(seed: int, share: float, needs: list[int], source: int) -> None:
    network = network_of(seed, share)
    wanted = brute(network, source, needs)
    allowed = np.isfinite(network.seconds)
    tables = tree_seconds(network, [np.arange(8) for _ in needs], allowed)
    assert tables[tuple(range(len(needs)))][(source, *needs)] == wanted
    moves = cheapest_tree(network, network.seconds, source, needs)
    if moves is None:
        assert wanted == np.inf
        return
    number = {network.move(each): each for each in range(len(network.source))}
    assert abs(sum(network.seconds[number[move]] for move in moves) - wanted) < 1e-6
    reached = {network.layouts[source]}
    for _ in moves:
        reached |= {move.target for move in moves if move.source in reached}
    assert {network.layouts[need] for need in needs} <= reached


def test_what_costs_nothing_leads_in_no_circles() -> None:
    network = network_of(0, 1.0)
    free = replace(network, seconds=np.zeros(len(network.source)))
    moves = cheapest_tree(free, free.seconds, 0, [7, 3])
    assert moves is not None and len(moves) == len({move.target for move in moves}) <= 4
