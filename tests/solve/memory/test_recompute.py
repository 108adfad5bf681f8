"""What is recomputed is about the cheapest that fits, and what is said of it is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from random import Random

import numpy as np
import pytest
import torch

from autopar.cluster import Link
from autopar.core.gathering import Gathering, ShardState
from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.core.program import Program
from autopar.core.recompute import Recompute, Segment
from autopar.core.schedule import ScheduleKind
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.recompute import recompute_seconds, shares
from autopar.cost.stages.intervals import intervals
from autopar.errors import InfeasibleError
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.schedules.in_flight import scheduled
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.search import choose
from autopar.solve.choices.space import build_space
from autopar.solve.memory.recompute import _Fitting, _table, everything, fit, ladder
from autopar.solve.program.solution import Solution
from autopar.solve.stages.cut_search import best, cut_at, cuts, least_bytes, recomputing_bound
from autopar.solve.stages.step import staged, step_weight
from tests.proof.models import Script
from tests.solve.brute_force import (
    BruteForce,
    blocks,
    branches,
    chain,
    normalised,
    random_prices,
    scores,
    small_space,
    unfolded,
)
from tests.solve.gatherings import EveryGathering

aten = torch.ops.aten
CLOSE = 1e-6  # relative
WITHIN = 0.02  # of the best there is
SELDOM = 0.1  # for a single cap
HOP = Link(1e-5, 1e8)
LATER = pytest.mark.long
GRAPHS = (
    chain,
    normalised,
    *(pytest.param(make, marks=LATER) for make in (branches, scores, lambda: blocks(2))),
)


@lru_cache
def partings(count: int) -> tuple[tuple[Segment, ...], ...]:
    """All sets of disjoint runs of `count` operators."""

    def after(start: int) -> Iterator[tuple[Segment, ...]]:
        if start >= count:
            yield ()
            return
        yield from after(start + 1)
        for stop in range(start + 1, count + 1):
            yield from (((start, stop), *rest) for rest in after(stop))

    return tuple(dict.fromkeys(after(0)))


def placed(graph: Graph, mesh: Mesh, seed: int) -> tuple[Prices, Program]:
    prices = random_prices(graph, mesh, Random(seed))
    folding = unfolded(graph)
    return prices, choose(graph, prices, build_space(graph, prices, folding), folding).program


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LATER) for seed in range(1, 6))])
def test_the_parts_are_about_the_cheapest_that_fit(make: Callable[[], Graph], seed: int) -> None:
    graph = make()
    prices, program = placed(graph, Mesh((2,)), seed)
    every = [replace(program, recompute=parts) for parts in partings(len(graph.operators))]
    known = [
        (recompute_seconds(PricedProgram(prices, each)), PricedProgram(prices, each).peak.nbytes)
        for each in every
    ]
    step = PricedProgram(prices, program).cost.weighted(1.0)
    peaks = sorted({nbytes for _, nbytes in known})
    for cap in (*peaks[:: max(1, len(peaks) // 6)], peaks[-1]):
        best = min(seconds for seconds, nbytes in known if nbytes <= cap)
        found = fit(PricedProgram(prices, program), cap)
        assert found.peak.nbytes <= cap
        assert found.seconds == pytest.approx(recompute_seconds(PricedProgram(prices, found.program)))
        assert found.seconds <= best + WITHIN * step
    assert fit(PricedProgram(prices, program), 0).peak.nbytes == pytest.approx(peaks[0], rel=WITHIN)


@pytest.mark.parametrize("costliest", range(4))
def test_of_equal_parts_the_dearest_are_given_up(costliest: int) -> None:
    """Four equal runs of three operators, apart, are recomputed, one in ten times the seconds; memory
    has room for what one, two or three of them spare."""
    s = Script()
    x = s.linear(s.user(64, 8), 8)
    for _ in range(24):
        x = s.call(aten.tanh.default, Ref(x))
    graph = s.graph(s.call(aten.sum.default, Ref(s.linear(x, 4))))
    prices, program = placed(graph, Mesh((2,)), 0)
    parts = tuple((start, start + 3) for start in (3, 7, 11, 15))
    table = _table(PricedProgram(prices, program))
    seconds, spared = np.zeros_like(table.seconds), np.zeros_like(table.spared)
    for block, (first, stop) in enumerate(parts):
        place = table.places.index(first), table.places.index(stop)
        seconds[place], spared[place] = 10.0 if block == costliest else 1.0 + block / 10, 1000.0
    table = replace(table, seconds=seconds, spared=spared, taken=np.zeros_like(table.taken))
    fitting = _Fitting(PricedProgram(prices, program))
    every, others = fitting.fitted(parts, 0.0), [part for part in parts if part != parts[costliest]]
    for left in range(1, 4):
        (cap,) = {fitting.fitted(some, 0.0).peak.nbytes for some in combinations(parts, left)}
        found = fitting.without_idle(every, table, cap)
        assert found.program.recompute == tuple(others[:left]) and found.peak.nbytes == cap


@pytest.mark.slow
@pytest.mark.parametrize("make", [chain, *(pytest.param(make, marks=LATER) for make in (normalised, scores))])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LATER) for seed in range(1, 8))])
def test_placement_and_parts_together_are_about_the_best_and_the_gap_is_true(
    make: Callable[[], Graph], seed: int
) -> None:
    """Under every cap that can be met, down to the least."""
    graph, random = make(), Random(seed)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=3, layouts=1)
    known = []
    for bound, program in BruteForce(graph, prices, space).programs():  # by other conversions, maybe
        for parts in partings(len(graph.operators)):
            each = replace(program, recompute=parts)
            nbytes = PricedProgram(prices, each).peak.nbytes
            again = recompute_seconds(PricedProgram(prices, each))
            known.append((bound + again, PricedProgram(prices, each).seconds, nbytes))
    peaks = sorted({nbytes for *_, nbytes in known})
    slower = []
    for cap in (*peaks[:3], *peaks[3::8]):
        found = choose(
            graph, prices, space, unfolded(graph), Goal(cap=cap, gap=1e-9, recompute=Recompute.AUTO)
        )
        bound = min(seconds for seconds, _, nbytes in known if nbytes <= cap)
        assert found.peak.nbytes <= cap
        assert found.seconds >= bound * (1 - CLOSE)
        assert found.seconds * (1 - found.gap) <= bound * (1 + CLOSE)
        slower.append(found.seconds / min(seconds for _, seconds, nbytes in known if nbytes <= cap) - 1)
    assert max(slower) <= SELDOM
    assert sum(slower) / len(slower) <= WITHIN


@pytest.mark.parametrize("make", [chain, pytest.param(scores, marks=LATER)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LATER) for seed in range(1, 10))])
def test_placement_and_cut_together_are_about_the_best(make: Callable[[], Graph], seed: int) -> None:
    graph, random, count, ranks = make(), Random(seed), 4, 2
    prices = random_prices(graph, Mesh((2,)), random)
    prices.step_weight, prices.micro_batches, prices.accumulates = (
        step_weight(ranks, count),
        count,
        True,
    )
    space = small_space(graph, prices, random, most=4, layouts=1)
    schedule = scheduled(ScheduleKind.ONE_F_ONE_B, ranks, 1, count)

    def cut(solution: Solution) -> float:
        return staged(solution, schedules=[schedule], hop=HOP, cap=None).seconds

    solution = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    programs = (program for _, program in BruteForce(graph, prices, space).programs())
    best = min(cut(replace(solution, priced=PricedProgram(prices, program))) for program in programs)
    assert best * (1 - CLOSE) <= cut(solution) <= best * (1 + WITHIN)


def two_stages(graph: Graph, kind: ScheduleKind, random: Random) -> MeshProblem:
    """Each of two devices, with four micro-batches."""
    request = Request(pipeline_ranks=2, micro_batches=4, schedule=kind, gap=1e-9)
    known = random_prices(graph, Mesh((2,)), random)
    problem = MeshProblem(graph, Mesh((2,)), known.cluster, known.model, request, None, HOP)
    problem.folding = unfolded(graph)
    return problem


def compare(problem: MeshProblem, programs: Sequence[Program], ways: Sequence[tuple[Segment, ...]]) -> None:
    """The plan with the best of all programs, cuts and `ways` of computing again: without a cap, and under
    caps down to the least, or about that."""
    count, steps = len(problem.graph.operators), []
    for program in programs:
        for parts in ways:
            each = replace(program, recompute=parts)
            table = intervals(PricedProgram(problem.prices, each), HOP, places=range(count + 1))
            cuts = (cut_at(table, problem.schedules[0], (0, start)) for start in range(1, count))
            steps += [(cut.seconds, max(cut.rank_bytes)) for cut in cuts]
    peaks = sorted({nbytes for _, nbytes in steps})
    slower = []
    for cap in (None, *peaks[:2], *peaks[2 :: max(1, len(peaks) // 6)]):
        best = min(seconds for seconds, nbytes in steps if cap is None or nbytes <= cap)
        try:
            found = problem.plan(problem.ask(cap=cap))
        except InfeasibleError:
            assert cap and cap < 1.1 * peaks[0], "levels of recomputing are few"
            continue
        assert cap is None or found.peak_bytes <= cap
        slower.append(found.seconds / best - 1)
        assert found.seconds * (1 - found.gap) <= best * (1 + CLOSE)
    assert max(slower) <= SELDOM
    assert sum(slower) / len(slower) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, pytest.param(ScheduleKind.GPIPE, marks=LATER)])
@pytest.mark.parametrize("make", [chain, pytest.param(scores, marks=LATER)])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=LATER) for seed in (0, 2, 3))])
def test_placement_cut_and_parts_together_are_about_the_best_and_the_gap_is_true(
    make: Callable[[], Graph], kind: ScheduleKind, seed: int
) -> None:
    graph, random = make(), Random(seed)
    problem = two_stages(graph, kind, random)
    space = problem.spaces[None] = small_space(graph, problem.prices, random, most=2, layouts=1)
    programs = [program for _, program in BruteForce(graph, problem.prices, space).programs()]
    compare(problem, programs, partings(len(graph.operators)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, pytest.param(ScheduleKind.GPIPE, marks=LATER)])
@pytest.mark.parametrize(
    ("seed", "apart"),
    [(0, False), *(pytest.param(seed, True, marks=LATER) for seed in range(4))],
)
def test_with_every_way_of_storing_weights_they_are_too(kind: ScheduleKind, seed: int, apart: bool) -> None:
    """Placement, cut, parts and sharded weights together; all operators are recomputed, or none, or any
    parts `apart`."""
    graph, random = chain(), Random(seed)
    problem = two_stages(graph, kind, random)
    space = small_space(graph, problem.prices, random, most=2, layouts=2)
    space = problem.spaces[None] = replace(space, gatherings=ShardState.AUTO.gatherings)
    programs = [program for _, program in EveryGathering(graph, problem.prices, space).gathered_programs()]
    assert {way for program in programs for way in program.gatherings.values()} == set(Gathering)
    count = len(graph.operators)
    compare(problem, programs, partings(count) if apart else ((), ((0, count),)))


def test_each_rung_keeps_less_than_the_one_before() -> None:
    graph = blocks(6)
    prices, program = placed(graph, Mesh((2,)), 0)
    rungs = [each.program for each in ladder(PricedProgram(prices, program), 5)]
    kept = [PricedProgram(prices, each).peak.saved for each in rungs]
    assert rungs[0].recompute == () and 2 <= len(rungs) <= 6
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)
    assert everything(PricedProgram(prices, program)).peak.saved < kept[0]


@pytest.mark.parametrize("kind", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
def test_no_cut_that_computes_again_beats_its_bound(kind: ScheduleKind) -> None:
    """Whatever level each stage takes, under every cap."""
    graph = blocks(5)
    prices, program = placed(graph, Mesh((2,)), 1)
    places = range(len(graph.operators) + 1)
    rungs = [each.program for each in ladder(PricedProgram(prices, program), 5)]
    tables = [intervals(PricedProgram(prices, each), Link(1e-6, 1e9), places=places) for each in rungs]
    schedule, worth = scheduled(kind, 2, 1, 4), shares(PricedProgram(prices, program))
    free, _ = best(cuts(tables[:1], [schedule]))
    most, least = max(free.rank_bytes), least_bytes(tables, schedule)
    assert least < most
    for part in (0.0, 0.2, 0.4, 0.6, 0.8):
        cap = int(least + part * (most - least))
        found, _ = best(cuts(tables, [schedule], cap=cap))
        assert max(found.rank_bytes) <= cap
        assert recomputing_bound(tables[0], worth, [schedule], cap=cap) <= found.seconds * (1 + CLOSE)
