"""No placement, wherever it is cut, takes less than the bound, and where blocks are alike it is near."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from autopar.cluster import Link
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.schedule import Schedule, ScheduleKind
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.stages.intervals import intervals
from autopar.schedules.in_flight import scheduled
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.search import choose
from autopar.solve.stages.cut_search import cut
from autopar.solve.stages.joint_bound import ExchangeTables
from autopar.solve.stages.step import step_weight
from tests.solve.brute_force import (
    BruteForce,
    blocks,
    branches,
    chain,
    normalised,
    random_prices,
    scores,
    small_space,
    twice,
    unfolded,
)

CLOSE = 1e-9  # relative
HOP = Link(1e-5, 1e8)
COUNT, RANKS = 4, 2
KINDS = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB1P)
LATER = pytest.mark.long


def two_stages(kind: ScheduleKind, count: int = COUNT) -> Schedule:
    return scheduled(kind, RANKS, 1, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [chain, twice, normalised, *(pytest.param(make, marks=LATER) for make in (branches, scores))]
)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=LATER) for seed in range(2, 6))])
def test_no_placement_and_cut_takes_less(make: Callable[[], Graph], seed: int) -> None:
    graph, random = make(), Random(seed)
    prices = random_prices(graph, Mesh((2,)), random)
    prices.step_weight, prices.micro_batches, prices.accumulates = (
        step_weight(RANKS, COUNT),
        COUNT,
        True,
    )
    space = small_space(graph, prices, random, most=3, layouts=2)
    fastest = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    places = range(len(graph.operators) + 1)
    table = intervals(PricedProgram(prices, fastest.program), HOP, places=places)
    exchange = ExchangeTables(graph, prices, space, unfolded(graph), fastest, table)
    programs = [program for _, program in BruteForce(graph, prices, space).programs()]
    tables = [intervals(PricedProgram(prices, program), HOP, places=places) for program in programs]
    for kind in KINDS:
        best = min(cut(each, two_stages(kind)).seconds for each in tables)
        assert 0 < exchange.bound([two_stages(kind)]) <= best * (1 + CLOSE)
    each = [exchange.bound([two_stages(kind)]) for kind in KINDS]
    assert exchange.bound(map(two_stages, KINDS)) == min(each)


@pytest.mark.parametrize("kind", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
def test_it_is_near_where_many_blocks_are_alike(kind: ScheduleKind) -> None:
    graph = blocks(24)
    count = 16
    prices = random_prices(graph, Mesh((2,)), Random(0))
    prices.step_weight, prices.micro_batches, prices.accumulates = (
        step_weight(RANKS, count),
        count,
        True,
    )
    space = small_space(graph, prices, Random(0), most=1, layouts=1)
    fastest = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    table = intervals(PricedProgram(prices, fastest.program), HOP, places=range(len(graph.operators) + 1))
    bound = ExchangeTables(graph, prices, space, unfolded(graph), fastest, table).bound(
        [two_stages(kind, count)]
    )
    assert bound >= 0.95 * cut(table, two_stages(kind, count)).seconds
