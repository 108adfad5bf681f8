"""What was asked before, and its limits, change nothing of what is found for an ask."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from autopar.core.mesh import Mesh
from autopar.cost.operators.prices import Prices
from autopar.planning.asked.ask import Ask, Limits
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.whole_step import WholeStep
from autopar.solve.program.solution import CutoffError, Solution
from tests.solve.brute_force import chain, random_prices


def problem() -> MeshProblem:
    graph = chain()
    known = random_prices(graph, Mesh((2,)), Random(0))
    request = Request(mesh=Mesh((2,)))
    hop = known.cluster.intra
    return MeshProblem(graph, Mesh((2,)), known.cluster, known.model, request, None, hop)


def test_an_ask_is_answered_once_and_what_is_proved_serves_who_needs_no_proof() -> None:
    one = problem()
    found = one.solve(one.ask())
    assert one.solve(one.ask()) is found
    assert one.solve(replace(one.ask(), bounded=False)) is found
    other = problem()
    loose = other.solve(other.ask(bounded=False))
    assert loose.bound == -math.inf
    assert other.solve(other.ask()).bound > 0


def test_a_cutoff_ends_its_own_search_alone() -> None:
    one = problem()
    seconds = problem().plan(one.ask()).seconds
    with pytest.raises(CutoffError):
        one.plan(one.ask(), Limits(cutoff=seconds / 2))
    assert one.plan(one.ask()).seconds == seconds


def test_nothing_is_sought_under_a_cap_where_no_plan_beats_the_cutoff_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, caps = problem(), list[int | None]()
    fastest = one.solve(one.ask())

    def hidden(self: WholeStep, ask: Ask, limits: Limits) -> tuple[list[Solution], float]:
        caps.append(ask.cap)
        return [fastest], 2.0

    monkeypatch.setattr(Prices, "overlap", 0.5)
    monkeypatch.setattr(WholeStep, "hidden", hidden)
    with pytest.raises(CutoffError):
        WholeStep(one).best(one.ask(cap=1), Limits(cutoff=2.0))
    assert caps == [None]
    WholeStep(one).best(one.ask(cap=1), Limits(cutoff=2.1))
    assert caps == [None, None, 1]
