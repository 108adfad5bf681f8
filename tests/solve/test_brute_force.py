"""The solver's optimum is the best of all plans, and what it says about it is true."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.core.placement import R
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import InfeasibleError, SolverError
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.strategies import options_of
from autopar.solve.assignment import search
from autopar.solve.assignment.goal import Effort, Goal
from autopar.solve.assignment.least_memory import least
from autopar.solve.assignment.search import _PlacementSearch, choose
from autopar.solve.choices.fold import fold
from autopar.solve.choices.space import Space, build_space
from autopar.solve.linear_program import SolverAnswer
from autopar.solve.program.problem import Problem
from autopar.solve.program.solution import Solution
from tests.proof.models import Script
from tests.solve.brute_force import (
    GRAPHS,
    BruteForce,
    blocks,
    branches,
    chain,
    normalised,
    parts,
    random_prices,
    scores,
    small_space,
    twice,
    unfolded,
)
from tests.solve.gatherings import EveryGathering

aten = torch.ops.aten

CLOSE = 1e-6  # relative


@pytest.mark.parametrize("mesh", [Mesh((3,)), Mesh((2, 2))], ids=str)
@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_the_optimum_is_the_best_of_all_plans(make: Callable[[], Graph], mesh: Mesh, seed: int) -> None:
    graph, random = make(), Random(seed)
    prices = random_prices(graph, mesh, random)
    space = small_space(graph, prices, random, most=5, layouts=3)
    best = BruteForce(graph, prices, space).best()
    found = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    assert best * (1 - CLOSE) <= found.bound <= best * (1 + CLOSE)
    assert found.seconds == pytest.approx(best, rel=CLOSE)
    assert found.status == "optimal"


@pytest.mark.parametrize("mesh", [Mesh((3,)), Mesh((2, 2))], ids=str)
@pytest.mark.parametrize("make", [twice, parts], ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", range(2))
def test_outputs_that_may_leave_in_parts_leave_as_is_best(
    make: Callable[[], Graph], mesh: Mesh, seed: int
) -> None:
    graph, random = make(), Random(seed)
    prices = random_prices(graph, mesh, random)
    space = small_space(graph, prices, random, most=5, layouts=3, local=True)
    loss, kept = graph.outputs
    assert len(space.outputs[kept]) > 1 and len(space.outputs[loss]) == 1
    found = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    assert found.seconds == pytest.approx(BruteForce(graph, prices, space).best(), rel=CLOSE)
    assert found.program.outputs[kept] in space.outputs[kept]


@pytest.mark.parametrize("make", [chain, twice, scores, parts], ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_under_a_cap_the_plan_fits_and_the_gap_to_the_best_that_fits_is_true(
    make: Callable[[], Graph], seed: int
) -> None:
    """Every placement is tried with its fastest conversions: slower ones that hold less may do better."""
    graph, random = make(), Random(seed)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=4, layouts=2)
    every = BruteForce(graph, prices, space)
    plans = sorted(every.plans())
    peaks = sorted({peak for _, peak in plans})
    leanest, _ = least(graph, prices, space, unfolded(graph))
    assert leanest is not None
    assert leanest.peak == PricedProgram(prices, leanest.program).peak
    for cap in (leanest.peak.nbytes, *peaks[:: max(1, len(peaks) // 5)], peaks[-1]):
        if cap < leanest.peak.nbytes:
            continue
        best = min((seconds for seconds, peak in plans if peak <= cap), default=math.inf)
        found = choose(graph, prices, space, unfolded(graph), Goal(cap=cap, gap=1e-9))
        assert found.peak.nbytes <= cap and found.peak == PricedProgram(prices, found.program).peak
        assert found.seconds >= every.seconds(found.program.strategies) * (1 - CLOSE)
        assert found.seconds * (1 - found.gap) <= best * (1 + CLOSE)
        if found.status == "optimal":
            assert found.seconds <= best * (1 + CLOSE)
    with pytest.raises(InfeasibleError):
        choose(
            graph,
            prices,
            space,
            unfolded(graph),
            Goal(cap=min(peaks[0], leanest.peak.nbytes) // 2, gap=1e-9),
        )


def test_the_least_memory_is_sought_when_somebody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for an error that is caught."""
    sought, least_of = list[bool](), search.least

    def counted(*args: Any, **options: Any) -> Solution | None:
        sought.append(True)
        return least_of(*args, **options)

    monkeypatch.setattr(search, "least", counted)
    graph = chain()
    prices = random_prices(graph, Mesh((2,)), Random(0))
    space = small_space(graph, prices, Random(0), most=4, layouts=2)
    with pytest.raises(InfeasibleError) as caught:
        choose(graph, prices, space, unfolded(graph), Goal(cap=1))
    assert not sought and caught.value.would_do == math.inf
    minimum = caught.value.least
    assert sought and minimum is not None and f"({minimum} bytes)" in str(caught.value)
    assert choose(graph, prices, space, unfolded(graph), Goal(cap=minimum)).peak.nbytes <= minimum


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, pytest.param(0.6, marks=pytest.mark.long)])
def test_where_branching_takes_too_long_the_plan_fits_all_the_same(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Rounded relaxations are plans like others: replayed, within the cap, their gap true."""
    rounded: list[float] = []
    patient = _PlacementSearch.branch

    def hasty(search: _PlacementSearch, problem: Problem, relaxed: SolverAnswer) -> SolverAnswer:
        if problem.cap is None:
            return patient(search, problem, relaxed)
        rounded.append(problem.cap)
        return SolverAnswer(None, math.inf, -math.inf, "time_limit")

    graph = branches()
    prices, folding = random_prices(graph, Mesh((2, 2)), Random(4)), unfolded(graph)
    space = build_space(graph, prices, folding)
    (leanest, _), fastest = least(graph, prices, space, folding), choose(graph, prices, space, folding)
    assert leanest is not None
    cap = int(leanest.peak.nbytes + share * (fastest.peak.nbytes - leanest.peak.nbytes))
    best = choose(graph, prices, space, folding, Goal(cap=cap, gap=1e-9))
    monkeypatch.setattr(_PlacementSearch, "branch", hasty)
    found = choose(graph, prices, space, folding, Goal(cap=cap, gap=1e-9))
    assert rounded
    assert best.status == "optimal"
    assert found.peak.nbytes <= cap
    assert best.seconds * (1 - CLOSE) <= found.seconds
    assert found.bound <= best.seconds * (1 + CLOSE)


@pytest.mark.parametrize("make", [chain, branches, twice, normalised], ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_done_once_a_step_counts_less_than_what_every_micro_batch_does(
    make: Callable[[], Graph], seed: int
) -> None:
    """The gradient sum of a weight that is stored in shards follows a gather: it is not done once."""
    graph, random = make(), Random(seed)
    prices = random_prices(graph, Mesh((3,)), random)
    prices.step_weight = 0.1
    space = small_space(graph, prices, random, most=5, layouts=3)
    best = BruteForce(graph, prices, space).best()
    found = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    assert found.bound <= best * (1 + CLOSE)
    assert found.seconds == pytest.approx(best, rel=CLOSE)
    assert found.seconds == pytest.approx(PricedProgram(prices, found.program).cost.weighted(0.1))


def test_folding_finds_the_optimum_and_bounds_it_from_below() -> None:
    graph = blocks(4)
    for seed in range(3):
        prices = random_prices(graph, Mesh((2,)), Random(seed))
        folding = fold(graph, prices.dims)
        assert folding.count == 4
        free = choose(
            graph, prices, build_space(graph, prices, unfolded(graph)), unfolded(graph), Goal(gap=1e-9)
        )
        folded = choose(graph, prices, build_space(graph, prices, folding), folding, Goal(gap=1e-9))
        assert folded.seconds == pytest.approx(free.seconds, rel=CLOSE)
        assert folded.bound <= free.seconds * (1 + CLOSE)


def towers() -> Graph:
    """Four blocks of one kind, four of another that all read what the first gave."""
    s = Script()
    x = s.call(aten.tanh.default, Ref(s.user(8, 6, grad=True)))
    for _ in range(4):
        h = s.call(aten.linear.default, Ref(x), Ref(s.weight(6, 6)))
        x = s.call(aten.add.Tensor, Ref(s.call(aten.gelu.default, Ref(h))), Ref(x))
    y = memory = s.call(aten.exp.default, Ref(x))
    for _ in range(4):
        h = s.call(aten.mul.Tensor, Ref(s.linear(y, 6)), Ref(memory))
        y = s.call(aten.sub.Tensor, Ref(h), Ref(memory))
    return s.graph(s.call(aten.sum.default, Ref(y)))


def test_folding_two_runs_of_which_one_reads_the_other_bounds_all_plans_from_below() -> None:
    graph = towers()
    for seed in range(3):
        prices = random_prices(graph, Mesh((2,)), Random(seed))
        folding = fold(graph, prices.dims)
        assert folding.count == 8
        free = choose(
            graph, prices, build_space(graph, prices, unfolded(graph)), unfolded(graph), Goal(gap=1e-9)
        )
        folded = choose(graph, prices, build_space(graph, prices, folding), folding, Goal(gap=1e-9))
        assert folded.bound <= free.seconds * (1 + CLOSE)
        assert free.seconds * (1 - CLOSE) <= folded.seconds <= 1.1 * free.seconds


def test_the_status_is_true_however_short_the_time() -> None:
    """With no time there is no plan, or one whose bound holds and whose status says what is known."""
    graph = blocks(3)
    prices = random_prices(graph, Mesh((2, 2)), Random(0))
    space = build_space(graph, prices, unfolded(graph))
    best = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9)).seconds
    for limit in (1e-3, 0.2, 1.0):
        try:
            found = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9), Effort(time_limit=limit))
        except SolverError:
            continue
        assert found.bound <= best * (1 + CLOSE) <= found.seconds * (1 + 2 * CLOSE)
        if found.status == "optimal":
            assert found.seconds == pytest.approx(best, rel=CLOSE)


def test_a_shared_conversion_is_paid_once_and_written_once() -> None:
    """Two consumers take a sharded tensor whole."""
    s = Script()
    x = s.user(8, 6, grad=True)
    h = s.call(aten.neg.default, Ref(x))
    first, second = s.call(aten.gelu.default, Ref(h)), s.call(aten.tanh.default, Ref(h))
    graph = s.graph(s.call(aten.sum.default, Ref(s.call(aten.add.Tensor, Ref(first), Ref(second)))))
    prices = random_prices(graph, Mesh((2,)), Random(0))
    factors = {h: "d0", first: "-", second: "-"}
    space = Space(
        {
            item.name: [
                (option,)
                for option in options_of(item, prices.dims)
                if option.factor == factors.get(str(item.results[0]), "-")
            ]
            for item in graph.operators
        },
        {item.name: [(R,)] for item in graph.inputs},
        dict.fromkeys(graph.outputs, [(R,)]),
    )
    found = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    assert found.seconds == pytest.approx(BruteForce(graph, prices, space).best(), rel=CLOSE)
    assert len({move.target for move in found.program.moves[h]}) == len(found.program.moves[h])
    written = [str(node.target) for node in rewrite(graph, found.program, prices.dims, rank=0).graph.nodes]
    gathers = [name for name in written if "autopar.s_to" in name or "autopar.p_to" in name]
    assert len(gathers) == len(found.program.moves[h])


LEVELS = {
    "auto": (Gathering.KEEP, Gathering.REGATHER, Gathering.ONCE),
    "kept": (Gathering.KEEP,),
    "again": (Gathering.REGATHER,),
    "once": (Gathering.ONCE,),
    "never": (),
}


@pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=[pytest.mark.long] if level == "auto" else []) for level in LEVELS],
)
@pytest.mark.parametrize("once", [pytest.param(1.0, marks=pytest.mark.long), 0.2])
@pytest.mark.parametrize(
    "make", [chain, pytest.param(twice, marks=pytest.mark.long)], ids=lambda make: make.__name__
)
def test_weights_are_gathered_as_is_best(make: Callable[[], Graph], once: float, level: str) -> None:
    """Of all plans with every way of gathering every weight the fastest, or the fastest that fits."""
    graph, random = make(), Random(7)
    prices = random_prices(graph, Mesh((2,)), random)
    prices.step_weight = once
    space = small_space(graph, prices, random, most=2, layouts=3)
    space = replace(space, gatherings=LEVELS[level])
    plans = sorted(set(EveryGathering(graph, prices, space).gathered_plans()))
    peaks = sorted({peak for _, peak in plans})
    found = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
    assert found.seconds == pytest.approx(plans[0][0], rel=CLOSE)
    assert found.bound <= plans[0][0] * (1 + CLOSE)
    for cap in peaks[:: max(1, len(peaks) // 4)]:
        best = min(seconds for seconds, peak in plans if peak <= cap)
        try:
            found = choose(graph, prices, space, unfolded(graph), Goal(cap=cap, gap=1e-9))
        except InfeasibleError:
            assert cap < 1.1 * peaks[0], "the leanest is found by rows that leave short-lived tensors out"
            continue
        assert found.peak.nbytes <= cap
        assert found.seconds >= best * (1 - CLOSE)
        assert found.seconds * (1 - found.gap) <= best * (1 + CLOSE)
