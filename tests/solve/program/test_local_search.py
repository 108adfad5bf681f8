"""Plans one choice away from a known one are tried while there is time."""

from __future__ import annotations

import math
import time
from random import Random

import pytest

from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.recompute import Recompute
from autopar.solve.assignment.search import choose
from autopar.solve.choices.space import build_space
from autopar.solve.program import local_search
from autopar.solve.program.local_search import CandidatePlan, search_locally
from autopar.solve.program.problem import Problem
from tests.solve.brute_force import random_prices, scores, unfolded


def scarce(graph: Graph) -> tuple[Problem, CandidatePlan, int]:
    """The fastest plan, and a cap that it doesn't meet."""
    prices, folding = random_prices(graph, Mesh((2,)), Random(0)), unfolded(graph)
    space = build_space(graph, prices, folding)
    fastest = choose(graph, prices, space, folding)
    cap = fastest.peak.nbytes - 1
    problem = Problem(graph, prices, space, folding, cap=cap)
    return problem, CandidatePlan(fastest.priced, fastest.seconds), cap


def test_a_plan_that_needs_less_is_found_nearby() -> None:
    problem, start, cap = scarce(scores())
    found = search_locally(problem, [start], cap, Recompute.NONE, deadline=math.inf)
    patient = search_locally(problem, [start], cap, Recompute.NONE)
    assert (found.program, found.seconds) == (patient.program, patient.seconds)
    assert found.excess(cap) < start.excess(cap)


def test_nothing_is_tried_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may pass between two plans, of which there are many, and then the best so far stays."""
    problem, start, cap = scarce(scores())
    tried = []
    replayed = local_search.CandidatePlan
    monkeypatch.setattr(local_search, "CandidatePlan", lambda *given: tried.append(given) or replayed(*given))
    assert (
        search_locally(problem, [start], cap, Recompute.NONE, deadline=time.monotonic()) is start
        and not tried
    )
    search_locally(problem, [start], cap, Recompute.NONE)
    many, ticks = len(tried), iter(range(10_000))
    tried.clear()
    monkeypatch.setattr(local_search.time, "monotonic", lambda: next(ticks))
    search_locally(problem, [start], cap, Recompute.NONE, deadline=5)
    assert 0 < len(tried) <= 5 < many


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.AUTO])
def test_no_more_plans_are_made_than_the_effort_allows(
    monkeypatch: pytest.MonkeyPatch, recompute: Recompute
) -> None:
    """Of a deep model all changes together would fill the memory of the machine that plans."""
    problem, start, cap = scarce(scores())
    made = []
    decoded = local_search.decoded
    monkeypatch.setattr(
        local_search, "decoded", lambda *given, **how: made.append(given) or decoded(*given, **how)
    )
    search_locally(problem, [start], cap, recompute, effort=3 * len(problem.graph.operators))
    few = len(made)
    search_locally(problem, [start], cap, recompute)
    assert 0 < few <= 8 < len(made)
