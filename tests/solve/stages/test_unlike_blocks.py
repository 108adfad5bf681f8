"""Blocks turn from one assignment to another where that makes the step shortest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.cost.machine.model import CostModel
from autopar.cost.program.priced_program import PricedProgram
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.solve.stages.mixture import Mixture
from autopar.solve.stages.step import Step, unstaged
from autopar.solve.stages.unlike_blocks import excess, seams, turned
from tests.proof.models import Script

aten = torch.ops.aten


def equal(layers: int, width: int, rows: int) -> Graph:
    """Equal layers, one after the other."""
    s = Script()
    x = s.user(rows, width)
    for _ in range(layers):
        x = s.call(aten.gelu.default, Ref(s.linear(x, width)))
    return s.graph(s.call(aten.sum.default, Ref(x)))


def corners(graph: Graph) -> tuple[MeshProblem, Step, Step]:
    """The fastest assignments if sums show in full, and if they take nothing: those of one hide, not the
    other's."""
    cluster = ClusterSpec(devices_per_node=4, device="h100", intra=Link(1e-9, 1e10))
    model = CostModel.of(cluster, None)
    problem = MeshProblem(graph, Mesh((4,)), cluster, model, Request(measure=False), None, cluster.intra)
    found = []
    for multiplier in (1.0, 0.0):
        solution = problem.solve(replace(problem.ask(bounded=False), multiplier=multiplier))
        found.append(unstaged(replace(solution, priced=PricedProgram(problem.prices, solution.program)), 1))
    hides, shows = found
    assert excess(hides.solution.priced) < 0 < excess(shows.solution.priced)
    return problem, hides, shows


def brute_force(problem: MeshProblem, hides: Step, shows: Step) -> list[PricedProgram]:
    """The programs of all places at which blocks may turn."""
    mixture = Mixture([each.solution.program for each in (hides, shows)], problem.prices, joins=True)
    found = []
    for place in seams(problem.graph, problem.folding):
        program = mixture.program(mixture.turning(place, 0, 1))
        assert program is not None
        found.append(PricedProgram(problem.prices, program))
    return found


@pytest.mark.parametrize(("layers", "width", "rows"), [(24, 512, 1024), (9, 1024, 2048), (7, 512, 512)])
def test_blocks_turn_where_the_step_is_shortest(layers: int, width: int, rows: int) -> None:
    problem, hides, shows = corners(equal(layers, width, rows))
    found = turned(hides, shows, problem.folding, count=1, cap=None)
    assert found is not None
    every = brute_force(problem, hides, shows)
    assert found.cost.of(1) == pytest.approx(min(each.cost.of(1) for each in every))
    assert any(excess(each) > 0 for each in every) and any(excess(each) < 0 for each in every)


def test_excess_is_what_a_step_shows_of_sums_and_grows_with_those_that_show() -> None:
    problem, hides, shows = corners(equal(12, 512, 1024))
    every = [excess(each) for each in brute_force(problem, hides, shows)]
    assert every == sorted(every, reverse=True)
    assert excess(shows.solution.priced) == pytest.approx(shows.cost.summed - shows.cost.hidden)


def test_what_does_not_meet_the_cap_is_not_taken() -> None:
    problem, hides, shows = corners(equal(12, 512, 1024))
    every = [each.peak.nbytes for each in brute_force(problem, hides, shows)]
    assert turned(hides, shows, problem.folding, count=1, cap=min(every) - 1) is None
    found = turned(hides, shows, problem.folding, count=1, cap=max(every))
    assert found is not None and found.peak.nbytes <= max(every)
