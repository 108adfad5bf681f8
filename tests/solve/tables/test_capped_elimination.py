"""Under a cap choices are eliminated at prices of bytes: bounds hold for all plans, and plans fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.recompute import Recompute
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import RuleError
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.symmetry import choose_named
from autopar.solve.choices.space import build_space
from autopar.solve.program.solution import CutoffError
from autopar.solve.tables.capped_elimination import CappedElimination, eliminated_under
from autopar.solve.tables.choice_tables import InputLayouts, WideError
from autopar.solve.tables.memory_tables import Chosen, MemoryTables, RowPrices
from autopar.solve.tables.priced_elimination import program_of
from tests.proof.models import Script
from tests.solve.brute_force import BruteForce, branches, chain, random_prices, small_space, twice, unfolded
from tests.solve.program.test_saved_variables import CLOSE, MADE, Watched
from tests.solve.tables.test_elimination import large_tables, prices_of

__all__ = ["large_tables"]
aten = torch.ops.aten
TRIED = 12  # assignments at random
PRICES = RowPrices(held=1e-6, rests=3e-6)
NOTHING = {"recompute": Recompute.NONE, "offload": Offload.NONE}
ANYHOW = Goal(gap=1e-9)


def deep(width: int = 1024) -> Graph:
    """Products of unlike widths."""
    s = Script()
    x = s.user(4 * width, width)
    for number in range(6):
        x = s.call(aten.gelu.default, Ref(s.linear(x, width + 128 * number)))
    return s.graph(s.call(aten.sum.default, Ref(x)))


def memory_tables(graph: Graph, prices: Prices) -> MemoryTables:
    return MemoryTables(
        graph, prices, build_space(graph, prices, unfolded(graph)), unfolded(graph), offloads=False
    )


def some_choices(tables: MemoryTables, random: Random) -> Chosen:
    kept = {
        number: random.randrange(len(joint.made.layouts))
        for number, joint in enumerate(tables.joints)
        if isinstance(joint.made, InputLayouts)
    }
    return Chosen([random.randrange(len(each)) for each in tables.choices], kept)


@pytest.mark.parametrize("made", MADE, ids=lambda made: getattr(made, "__name__", ""))
def test_tables_count_no_more_than_the_replayed_peak(made: Callable[[], Graph]) -> None:
    graph, random = made(), Random(7)
    try:
        tables = memory_tables(graph, random_prices(graph, Mesh((2,)), random))
    except WideError:
        pytest.skip("a tensor of many uses")
    search = CappedElimination(tables, 1, **NOTHING)
    search.at(PRICES)
    search.at(RowPrices())
    for chosen in [
        *(each.chosen for each in search.found),
        *(some_choices(tables, random) for _ in range(TRIED)),
    ]:
        totals = tables.totals(chosen)
        if not math.isfinite(totals.seconds):
            continue
        with contextlib.suppress(RuleError):
            replay = Watched(PricedProgram(tables.prices, program_of(tables, chosen)))
            assert totals.rests <= replay.run().nbytes * (1 + CLOSE)
            assert totals.held <= replay.held * (1 + CLOSE)


@pytest.mark.parametrize("make", [chain, branches, twice, deep], ids=lambda make: make.__name__)
def test_what_is_found_is_cheapest_at_prices_of_bytes(make: Callable[[], Graph]) -> None:
    graph, random = make(), Random(3)
    tables = memory_tables(graph, random_prices(graph, Mesh((2,)), random))
    search = CappedElimination(tables, 1, **NOTHING)
    search.at(PRICES)
    assert search.found[0].totals.at(PRICES, 0.0) == pytest.approx(search.bounds[PRICES], rel=1e-9)
    for _ in range(20 * TRIED):
        assert tables.totals(some_choices(tables, random)).at(PRICES, 0.0) >= search.bounds[PRICES] * (
            1 - 1e-9
        )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [chain, branches], ids=lambda make: make.__name__)
def test_no_plan_that_fits_takes_less_than_the_bound(make: Callable[[], Graph], seed: int) -> None:
    graph, random = make(), Random(seed)
    prices = random_prices(graph, Mesh((2,)), random)
    space = small_space(graph, prices, random, most=2, layouts=2)
    plans = sorted(BruteForce(graph, prices, space).plans())
    tables = MemoryTables(graph, prices, space, unfolded(graph), offloads=False)
    for cap in sorted({peak for _, peak in plans})[:: max(1, len(plans) // 4)]:
        best = min(seconds for seconds, peak in plans if peak <= cap)
        for recompute in (Recompute.NONE, Recompute.AUTO):
            with contextlib.suppress(WideError):
                found, _ = eliminated_under(tables, cap, recompute=recompute, offload=Offload.NONE)
                assert found.bound <= best * (1 + 1e-9)
                assert found.peak.nbytes <= cap
                assert recompute is Recompute.AUTO or found.seconds >= best * (1 - 1e-9)


def test_a_plan_under_a_cap_that_binds_is_close_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = deep()
    prices, folding = prices_of(graph), unfolded(graph)
    space = build_space(graph, prices, folding)
    free = choose_named(graph, prices, space, folding, ANYHOW)
    cap = int(0.85 * free.peak.nbytes)
    monkeypatch.setattr("autopar.solve.assignment.symmetry.LEAST_ELIMINATED_OPERATORS", 0)
    found = choose_named(graph, prices, space, folding, replace(ANYHOW, cap=cap))
    assert free.seconds < found.bound <= found.seconds < 1.05 * found.bound
    assert found.peak.nbytes <= cap
    goal = replace(ANYHOW, cap=cap, cutoff=0.99 * found.bound)
    with pytest.raises(CutoffError):
        choose_named(graph, prices, space, folding, goal)


def test_mixtures_run_the_first_operators_as_the_one_and_the_last_as_the_other() -> None:
    graph = deep()
    tables = memory_tables(graph, prices_of(graph))
    search = CappedElimination(tables, 1, **NOTHING)
    search.at(RowPrices())
    search.at(RowPrices(1.0, 1.0))
    fast, lean = search.found
    assert lean.totals.most < fast.totals.most
    caps = [lean.totals.most + share * (fast.totals.most - lean.totals.most) for share in (0.2, 0.5, 0.8)]
    mixed = [search.mixture(lean, fast, cap) for cap in caps]
    assert all(each.totals.most <= cap for each, cap in zip(mixed, caps, strict=True))
    seconds = [each.totals.seconds for each in (lean, *mixed, fast)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[-2] < seconds[0]
