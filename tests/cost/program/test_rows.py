"""Rows of a linear program by hand: what multipliers and credits change of a price, and of nothing else.

A row with a multiplier prices what starts early as shown in part, and pays a credit for what it hides
behind: sums of activations' gradients T behind theta of the gradients of weights W. Alone on its row, a T
that is longer than theta W costs exactly the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cluster import ClusterSpec
from autopar.core.costs import Kernels
from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import B, P, R, Shard
from autopar.core.program import Program
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.program.priced_program import PricedProgram
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.runtime.collectives.late_gradients import PRODUCTS
from tests.cost.operators.test_prices import FLOATS, GPU, UNIT
from tests.forced_programs import force_factors
from tests.proof.models import Script

aten = torch.ops.aten
S = Shard(0)
THETA = 0.5
EARLY = replace(GPU, kernels=Kernels(units=1, attention=1.0, attention_backward=1.0, overlap=THETA))
FAST = tuple((dtype, 1e12) for dtype in FLOATS)  # flop/s, so that bytes alone count


def layer(width: int, rows: int = 4) -> tuple[Graph, str]:
    """So many samples of 8 doubles that require gradients, through a layer of `width`."""
    s = Script()
    made = s.linear(s.call(aten.neg.default, Ref(s.user(rows, 8, grad=True))), width)
    return s.graph(s.call(aten.sum.default, Ref(made))), made


def problem_of(graph: Graph, **asked: Any) -> MeshProblem:
    device = replace(EARLY, flops=FAST)
    cluster = ClusterSpec(devices_per_node=2, device="h100", intra=UNIT)
    request = Request(mesh=Mesh((2,)), overlap=True, measure=False, **asked)
    model = CostModel(device, {}, CollectiveTable({}))
    return MeshProblem(graph, Mesh((2,)), cluster, model, request, None, UNIT)


def of_row(problem: MeshProblem, program: Program, multiplier: float, late: float) -> float:
    """What the program costs by a row's prices."""
    return PricedProgram(problem.row_prices(multiplier, late), program).cost.weighted(1.0)


@pytest.mark.parametrize("credits", [{"late_credit": 0.25}, {"compute_credit": 0.5}, {"credit": 0.125}])
def test_a_credit_is_a_part_of_the_seconds_that_it_is_named_for(credits: dict[str, float]) -> None:
    s = Script()
    made = s.linear(s.user(4, 8, grad=True), 16)
    other = s.call(aten.mm.default, Ref(made), Ref(s.weight(16, 8)))  # its gradients can't come late
    graph = s.graph(s.call(aten.sum.default, Ref(other)))
    problem = problem_of(graph)
    program = force_factors(graph, problem.dims, {made: "o"})
    assert problem.prices.operator(graph.operators[1], program.strategies[graph.operators[1].name]).weights
    credited = problem.prices.under(**credits)
    for operation in graph.operators:
        strategy = program.strategies[operation.name]
        usual, found = (prices.operator(operation, strategy) for prices in (problem.prices, credited))
        late = usual.weights if operation.target in PRODUCTS else 0.0
        assert (late > 0) == (made in operation.results)
        named = {"late_credit": late, "compute_credit": usual.compute, "credit": usual.behind}
        wanted = sum(part * named[name] for name, part in credits.items())
        assert usual.seconds - found.seconds == pytest.approx(found.credit) == pytest.approx(wanted)
        assert found.forward == usual.forward


@pytest.mark.parametrize(
    ("source", "target", "scaled"),
    [(R, B, True), (S, B, True), (S, R, False), (P, R, False), (B, S, False), (R, S, False)],
)
def test_only_exchanges_of_activations_gradients_are_shown_late(
    source: Any, target: Any, scaled: bool
) -> None:
    graph, made = layer(16)
    problem = problem_of(graph)
    weight = next(item.name for item in graph.inputs if item.name != graph.inputs[0].name)
    late = problem.prices.under(late_shown=0.25)
    move = Move(0, (source,), (target,))
    before, after = problem.prices.move_parts(graph.operators[0].results[0] or "", move)
    found = late.move_parts(graph.operators[0].results[0] or "", move)
    assert found == (before, 0.25 * after if scaled else after) and after + before > 0
    if (source, target) in ((R, B), (S, B)):  # a weight's
        assert late.move_parts(weight, move) == problem.prices.move_parts(weight, move)


def test_what_hides_wholly_costs_its_step_without_the_row_and_less_by_it() -> None:
    """The sum of 4 x 8 doubles is hidden by a wide layer's W."""
    graph, made = layer(640)
    problem = problem_of(graph)
    program = force_factors(graph, problem.dims, {made: "o"})
    cost = PricedProgram(problem.prices, program).cost
    weights = problem.prices.operator(graph.operators[1], program.strategies[graph.operators[1].name]).weights
    assert cost.beside == cost.early < THETA * weights
    assert of_row(problem, program, 0.0, 0.0) == pytest.approx(cost.of(1))
    assert of_row(problem, program, 0.0, 1.0) == pytest.approx(cost.of(1) + cost.early - THETA * weights)


@pytest.mark.parametrize("late", [0.25, 1.0])
def test_a_sum_that_shows_costs_its_step_by_the_late_row_alone(late: float) -> None:
    """T of 64 x 8 doubles outlasts theta W of one column: E = T - theta W, of which the row counts a part."""
    graph, made = layer(2, rows=512)
    problem = problem_of(graph)
    program = force_factors(graph, problem.dims, {made: "o"})
    cost = PricedProgram(problem.prices, program).cost
    weights = problem.prices.operator(graph.operators[1], program.strategies[graph.operators[1].name]).weights
    assert 0 < cost.beside == pytest.approx(THETA * weights) and cost.beside < cost.early
    exposed = cost.early - cost.beside
    assert of_row(problem, program, 0.0, late) == pytest.approx(cost.of(1) - (1 - late) * exposed)


@pytest.mark.parametrize(("multiplier", "late"), [(0.5, 0.0), (0.25, 0.5), (1.0, 0.0)])
def test_rows_add_up_by_their_multipliers(multiplier: float, late: float) -> None:
    """A = T here: mu (T - theta C) + nu (T - theta W) beside what nothing hides."""
    graph, made = layer(2, rows=512)
    problem = problem_of(graph)
    program = force_factors(graph, problem.dims, {made: "o"})
    priced = PricedProgram(problem.prices, program)
    compute = sum(price.compute for price in priced.operator_prices)
    weights = priced.operator_prices[1].weights
    sums, alone = priced.cost.early, priced.cost.of(1) + priced.cost.beside - priced.cost.early
    rows = multiplier * (sums - THETA * compute) + late * (sums - THETA * weights)
    assert of_row(problem, program, multiplier, late) == pytest.approx(alone + rows)
