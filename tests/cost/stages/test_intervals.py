"""Tables of stages by hand and by trying every stage."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch

from autopar.cluster import Link
from autopar.core.graph import Graph, Operator, Ref
from autopar.core.mesh import Mesh
from autopar.core.placement import R
from autopar.core.schedule import ALWAYS_SPLIT, SPLIT_BACKWARD, ScheduleKind
from autopar.core.strategy import Strategy
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.values import find_values
from autopar.cost.stages.intervals import intervals
from autopar.cost.stages.split_backward import _since
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from tests.forced_programs import force_each, option
from tests.proof.models import Script
from tests.solve.brute_force import GRAPHS, blocks, random_prices
from tests.solve.stages.test_cut_search import random_table, tied

aten = torch.ops.aten
HOP = Link(0.5, 1000.0)


def thrice() -> Graph:
    """A weight of 8 x 8 numbers that operators 0, 2 and 4 take."""
    s = Script()
    x, weight = s.user(4, 8), s.weight(8, 8)
    for _ in range(2):
        x = s.call(aten.tanh.default, Ref(s.call(aten.linear.default, Ref(x), Ref(weight))))
    return s.graph(s.call(aten.sum.default, Ref(s.call(aten.linear.default, Ref(x), Ref(weight)))))


def joined() -> Graph:
    """Two chains that begin one after the other, and their sum."""
    s = Script()
    first, second = (s.call(aten.tanh.default, Ref(s.linear(s.user(4, 8), 8))) for _ in range(2))
    return s.graph(s.call(aten.sum.default, Ref(s.call(aten.add.Tensor, Ref(second), Ref(first)))))


def test_stages_that_share_a_weight_sum_its_gradient_over_a_hop_unless_one_has_all_of_it() -> None:
    graph = thrice()
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))

    def everywhere(operation: Operator) -> Strategy:
        return (option(operation, dims, R),)

    program = force_each(graph, dims, everywhere)
    count = len(graph.operators)
    prices = random_prices(graph, Mesh((2,)), Random(0))
    table = intervals(PricedProgram(prices, program), HOP, places=range(count + 1))
    for p in range(count):
        for q in range(p + 1, count + 1):
            users = sum(p <= user < q for user in (0, 2, 4))
            shared = 2 * 0.5 + 8 * 8 * 8 / 1000  # there and back, half of it each time, both ways at once
            assert table.sync[p, q] == pytest.approx(shared if 0 < users < 3 else 0.0), (p, q)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_what_a_stage_needs_beside_what_it_keeps_is_as_its_schedule_splits_backward(
    kind: ScheduleKind,
) -> None:
    table = random_table(Random(0), 6)
    found = table.scheduled(kind)
    if kind in ALWAYS_SPLIT:
        wanted = table.halves.apart, table.halves.apart_early
    else:
        wanted = table.working, table.halves.made if kind in SPLIT_BACKWARD else table.early
    np.testing.assert_array_equal(found.working, wanted[0])
    np.testing.assert_array_equal(found.early, wanted[1])
    assert not np.array_equal(table.early, table.halves.made)
    assert not np.array_equal(table.working, table.halves.apart)


@pytest.mark.parametrize("make", [*GRAPHS, tied, thrice, joined, lambda: blocks(3)])
def test_what_an_operator_learns_from_begins_where_the_first_is_made(make: Callable[[], Graph]) -> None:
    graph = make()
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    program = force_each(graph, dims, lambda operation: (option(operation, dims, R),))
    values = find_values(graph, program, training=True)
    makers = {name: place for place, item in enumerate(graph.operators) for name in item.results if name}

    def before(place: int) -> set[int]:
        """The operator, and all on which it depends by what learns and isn't made by every stage."""
        learning = (
            makers[name]
            for name in graph.operators[place].operands
            if name in makers and graph.specs[name].requires_grad and name not in values.free
        )
        return {place}.union(*map(before, learning))

    assert _since(graph, values) == [min(before(place)) for place in range(len(graph.operators))]
