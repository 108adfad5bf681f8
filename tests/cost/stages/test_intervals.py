"""Tables of stages by hand and by trying every stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from torch import nn

from autopar.cluster import ClusterSpec, Link
from autopar.core.force import Parallelism
from autopar.core.gathering import ShardState
from autopar.core.graph import Graph, InputKind, Operator, Ref
from autopar.core.mesh import Mesh
from autopar.core.placement import R
from autopar.core.precision import Precision
from autopar.core.schedule import ALWAYS_SPLIT, SPLIT_BACKWARD, ScheduleKind
from autopar.core.strategy import Strategy
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.values import find_values
from autopar.cost.stages.intervals import intervals
from autopar.cost.stages.split_backward import _since
from autopar.planning.asked.request import Request
from autopar.planning.search import search
from autopar.runtime.parameters.gradient_buckets import ALONE_BYTES
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.export import trace
from autopar.trace.forward.autocast import Autocast
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


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32 * 1024, bias=False))


@pytest.mark.parametrize("make", [small, large], ids=lambda each: each.__name__)
def test_sums_of_gradients_count_in_the_dtype_that_is_asked_for(make: Callable[[], nn.Module]) -> None:
    """Small gradients are copied into buckets; in another dtype large ones are copied, too, and no sum is the
    gradient itself."""
    torch.manual_seed(0)
    model = make()
    traced = trace(model, (torch.randn(4, 64),), autocast=Autocast("cpu", torch.bfloat16))
    request = Request(
        dtype=Precision.BF16, force=Parallelism.BATCH, shard_state=ShardState.NONE, measure=False
    )
    program = search(traced.graph, ClusterSpec.local(2), request).plan.program
    count = len(traced.graph.operators)
    prices = random_prices(traced.graph, Mesh((2,)), Random(0))
    rates = tuple((dtype, 1e7) for dtype in (torch.bfloat16, torch.float32))
    prices = replace(prices, model=replace(prices.model, device=replace(prices.device, flops=rates)))
    wide, narrow = (
        intervals(
            PricedProgram(replace(prices, reduce=reduce), program), HOP, places=range(count + 1)
        ).summing[0, count]
        for reduce in (Precision.FP32, Precision.BF16)
    )
    weights = [item for item in traced.graph.inputs if item.kind is InputKind.PARAMETER]
    summed = [item.spec.numel for item in weights if program.moves.get(item.name)]
    in_buckets = sum(count for count in summed if 4 * count < ALONE_BYTES)
    assert len(summed) >= 2 and narrow == 2 * sum(summed)
    assert wide == 4 * in_buckets


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
