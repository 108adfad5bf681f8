"""Any program over time: what links carry is exposed or hidden, and parts and moments add up to the step."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest

from autopar.api import timeline
from autopar.cluster import ClusterSpec, Link
from autopar.core.graph import InputKind
from autopar.core.mesh import Mesh
from autopar.core.timeline import RankActivity
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.devices import OVERLAP, device_model
from autopar.cost.machine.model import CostModel
from autopar.cost.program.gathering import regathers
from autopar.cost.program.priced_program import PricedProgram
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.report import report
from autopar.results.plan.plan import Plan
from autopar.solve.program.solution import Solution
from autopar.solve.stages.step import Step, unstaged
from tests.proof.models import draw_model
from tests.proof.plans import draw_program

CLOSE = 1e-9  # relative
MESHES = ((2,), (4,), (2, 2), (3, 2))
COUNTS = [12, pytest.param(200, marks=pytest.mark.long)]


def drawn(random: Random, device: str) -> tuple[Step, Plan]:
    """A program at random on links of any speed, its step and its plan."""
    model, mesh = draw_model(random), Mesh(random.choice(MESHES))
    link = Link(10 ** random.uniform(-9, -5), 10 ** random.uniform(5, 11))
    count = random.choice((1, 1, 3))
    request = Request(
        mesh=mesh, micro_batches=count, overlap=random.random() < 0.7, measure=False, alternatives=False
    )
    cluster = ClusterSpec(devices_per_node=mesh.num_devices, device=device, intra=link)
    costs = CostModel(device_model(device), {}, CollectiveTable({}))
    problem = MeshProblem(model.graph, mesh, cluster, costs, request, None, link)
    program = draw_program(random, model.graph, problem.dims)
    priced = PricedProgram(problem.prices, program)
    step = unstaged(Solution(priced, priced.seconds, 0.0, "forced", priced), count)
    return step, report(step, cluster, [], None, request)


def carried(priced: PricedProgram, count: int) -> float:
    """Seconds of everything that the links of all axes carry in a step, whatever goes on meanwhile."""
    prices, by_axis = priced.prices, defaultdict[int, float](float)
    weights = {item.name for item in priced.graph.inputs if item.kind is InputKind.PARAMETER}
    for value in priced.values.of.values():
        if value.move is not None and value.leads:
            by_axis[value.move.axis] += prices.gradient_sync(value.name, value.move)
        elif value.move is not None:
            whole = prices.gradient_sync if value.name in weights else prices.move
            by_axis[value.move.axis] += count * whole(value.name, value.move)
    again = sum(each.seconds for each in regathers(priced))
    within = sum(price.communication for price in priced.operator_prices)
    return sum(by_axis.values()) + count * (again + within)


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("drawn_programs", COUNTS)
def test_what_links_carry_is_exposed_or_hidden_and_parts_are_the_step(
    device: str, drawn_programs: int
) -> None:
    random, hid = Random(device), 0
    for _ in range(drawn_programs):
        step, plan = drawn(random, device)
        parts, count = plan.parts, plan.pipeline.micro_batches
        exact = pytest.approx(plan.step_seconds, rel=CLOSE)
        assert step.seconds == exact and parts.total == exact
        assert min(parts.as_dict().values()) >= 0
        links = carried(step.solution.priced, count)
        assert parts.communication + parts.sums + parts.hidden == pytest.approx(
            links, abs=CLOSE * exact.expected
        )
        assert parts.hidden <= OVERLAP * parts.compute * (1 + CLOSE)
        hid += parts.hidden > 0
    assert (hid > drawn_programs / 4) == (device == "h100")


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("drawn_programs", COUNTS)
def test_moments_and_the_timeline_end_with_the_step(device: str, drawn_programs: int) -> None:
    random, early = Random(device), 0
    for _ in range(drawn_programs):
        step, plan = drawn(random, device)
        cost, count = step.cost, plan.pipeline.micro_batches
        exact = pytest.approx(plan.step_seconds, rel=CLOSE)
        repeated = sum(moment.seconds for moment in plan.moments if not moment.phase.is_once)
        once = sum(moment.seconds for moment in plan.moments if moment.phase.is_once)
        assert count * repeated + once == exact
        assert min(moment.seconds for moment in plan.moments) >= 0
        found = timeline(plan)
        assert found.seconds == exact
        sums = sum(event.stop - event.start for event in found.events if event.kind is RankActivity.SYNC)
        assert sums == pytest.approx(cost.sync, abs=CLOSE * plan.step_seconds)
        early += cost.beside > 0
    assert (early > drawn_programs / 8) == (device == "h100")
