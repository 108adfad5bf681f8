"""Conversions follow from choices: the cheapest tree of them, by every tree there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import P, R, Shard
from autopar.solve.choices.memory_price import FREE
from autopar.solve.program.decode import _moves_of, _reach, _regather_seconds
from autopar.solve.program.problem import Problem
from tests.solve.brute_force import chain, random_prices, small_space, unfolded
from tests.solve.gatherings import EveryGathering

CLOSE = 1e-9
WITHIN = 1.1  # of the cheapest, where a path doesn't know what is regathered in backward
Tree = tuple[Move, ...]


def weights(
    seed: int, once: float
) -> Iterator[tuple[Gathering, float, dict[Tree, tuple[float, float, float]]]]:
    """For each weight of a chain, however it is stored and taken, and for each way of gathering it: seconds
    of the conversions that are chosen; and of every tree, those of what backward regathers by the plain
    sum over its uses, and as they are counted."""
    graph, random = chain(), Random(seed)
    prices = random_prices(graph, Mesh((2,)), random)
    prices.step_weight = once
    space = small_space(graph, prices, random, most=2, layouts=3)
    space = replace(space, gatherings=tuple(Gathering))
    every = EveryGathering(graph, prices, space)
    problem = Problem(graph, prices, space, unfolded(graph), cap=None, memory_price=FREE)
    stored = [
        (strategies, tensor, layout)
        for strategies in every.strategies()
        for tensor in problem.tensors
        if every.is_weight(tensor.name)
        for layout in space.inputs[tensor.name]
    ]
    for strategies, tensor, layout in stored:
        name = tensor.name
        source, needs = every.ends(
            name, layout, None, tuple(strategies[item] for item in every.touching(name))
        )
        way = partial(every.way, name, source, needs)
        for gathering in Gathering if layout != (R,) else (Gathering.KEEP,):
            trees = {
                tree: (
                    way(tree, strategies, gathering),
                    way(tree, strategies, Gathering.REGATHER) - way(tree, strategies, Gathering.KEEP),
                    _regather_seconds(problem, name, tree, strategies, Gathering.REGATHER),
                )
                for tree in every.trees(name, source, needs)
                if gathering is Gathering.KEEP or not any(P in move.placements for move in tree)
            }
            inputs = {name: layout}
            chosen = _moves_of(problem, tensor, strategies, inputs, {}, None, gathering, around=True)
            yield gathering, way(chosen, strategies, gathering), trees


@pytest.mark.parametrize(("seed", "once"), [(0, 0.2), (1, 0.2), (2, 1.0)])
def test_weights_are_converted_by_the_cheapest_tree_of_moves(seed: int, once: float) -> None:
    met = dict.fromkeys(Gathering, 0)
    for gathering, chosen, trees in weights(seed, once):
        least = min(seconds for seconds, _, _ in trees.values())
        assert least * (1 - CLOSE) <= chosen
        assert chosen <= least * (WITHIN if gathering is Gathering.REGATHER else 1 + CLOSE)
        for _, again, counted in trees.values():
            assert counted == pytest.approx(again, rel=CLOSE, abs=1e-15)
        met[gathering] += any(again > 0 for _, again, _ in trees.values())
    assert all(met.values())


def test_of_moves_that_carry_flow_those_on_ways_to_the_needs_are_kept() -> None:
    start, middle, end, other = (R,), (Shard(0),), (Shard(1),), (P,)
    on, back, out = Move(0, start, middle), Move(0, end, middle), Move(0, middle, end)
    assert set(_reach(start, [end], {on, out, back}) or ()) == {on, out}  # a circle is gone round once
    assert _reach(start, [middle], {on, out}) == (on,)
    assert _reach(start, [start], {on, out}) == ()
    assert _reach(start, [end, other], {on, out}) is None  # one of them is cut off
    assert _reach(start, [end], {out}) is None
