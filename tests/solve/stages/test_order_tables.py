"""Tables of unlike devices in another order are those that are made for that order."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from autopar.core.graph import Graph
from autopar.cost.stages.intervals import intervals
from autopar.planning.asked.ask import Limits
from autopar.planning.staged_step import MOVABLE, StagedStep
from autopar.solve.stages.order_tables import OrderTables
from autopar.solve.stages.step import staged
from tests.planning.test_group_orders import cluster_of, decided
from tests.planning.test_group_orders import graph as graph

SPEEDS = (1.0, 3.0, 2.0)


def equal(one: Any, other: Any) -> bool:
    if is_dataclass(one):
        return all(equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.array_equal(one, other))


def test_tables_are_made_once_for_all_orders(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = decided(graph, cluster_of(*SPEEDS), ranks=3).problem
    priced = problem.solve(problem.ask()).priced
    places, tables, made = range(len(graph.operators) + 1), OrderTables(problem.hop), list[object]()

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return intervals(*args, **options)

    monkeypatch.setattr("autopar.solve.stages.order_tables.intervals", counted)
    for order in permutations(problem.blocks):
        there = priced.at(problem.prices.in_order(order))
        assert equal(tables.at(there, places), intervals(there, problem.hop, places=places))
    assert len(made) == 1


def test_no_order_that_is_left_out_is_faster(graph: Graph) -> None:
    decision = decided(graph, cluster_of(*SPEEDS), ranks=3)
    problem = decision.problem
    solution = problem.solve(problem.ask(cap=problem.cap))
    assert problem.blocks and {each.kind for each in problem.schedules} & set(MOVABLE)
    every = []
    for order in permutations(range(3)):
        kinds = [each for each in problem.schedules if order == (0, 1, 2) or each.kind in MOVABLE]
        prices = problem.prices.in_order([problem.blocks[host] for host in order])
        there = replace(solution, priced=solution.priced.at(prices))
        every.append(staged(there, schedules=kinds, hop=problem.hop, cap=problem.cap).seconds)
    assert len(set(every)) > 1
    found = StagedStep(problem).stage(solution, problem.cap, Limits())
    assert found.seconds == min(every)


def test_what_cannot_beat_the_plan_is_cut_in_its_order_alone(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = decided(graph, cluster_of(*SPEEDS), ranks=3)
    problem, ranks = decision.problem, decision.step.solution.priced.prices.ranks
    orders, cut = list[object](), staged

    def counted(solution: Any, **options: Any) -> Any:
        orders.append(solution.priced.prices.ranks)
        return cut(solution, **options)

    monkeypatch.setattr("autopar.planning.staged_step.staged", counted)
    slow = replace(problem.solve(problem.ask()), seconds=1e9)
    StagedStep(problem).stage(slow, problem.cap, Limits(incumbent=decision.step))
    assert orders == [ranks]
    orders.clear()
    problem.known_cuts.known.clear()
    StagedStep(problem).stage(slow, problem.cap, Limits())
    assert len(orders) == 6
