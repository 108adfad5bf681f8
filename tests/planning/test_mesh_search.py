"""A plan's gap is that of its seconds to its bound, and no plan beats the bound."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from autopar.cluster import ClusterSpec, Link
from autopar.core.force import Parallelism
from autopar.core.graph import Graph, Ref
from autopar.core.mesh import Mesh
from autopar.core.pipeline import stages_per_rank
from autopar.core.program import Program
from autopar.core.schedule import ScheduleKind
from autopar.cost.machine.model import CostModel
from autopar.cost.program import priced_program
from autopar.cost.program.peak_memory import peak_memory
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.stages.intervals import intervals
from autopar.errors import AutoparError, SolverError
from autopar.planning.asked.request import Request
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.search import FoundPlan, search
from autopar.schedules.fill_bubbles import order_of
from autopar.schedules.in_flight import scheduled
from autopar.schedules.simulate import simulate
from autopar.solve.stages.cut_search import cut_at
from autopar.solve.stages.step import Step
from tests.proof.models import Script
from tests.solve.brute_force import BruteForce, random_prices, small_space, unfolded

aten = torch.ops.aten
CLOSE = 1e-9  # relative
HOP = Link(1e-5, 1e8)
CLUSTER = ClusterSpec(devices_per_node=4, device="h100", intra=Link(1e-9, 1e9))
PLAIN: dict[str, Any] = {"measure": False, "alternatives": False}
KINDS = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB1P)


def unequal() -> Graph:
    """Layers of 8, 64 and 24 numbers, one after the other: no two of them cost the same."""
    s = Script()
    x = s.user(8, 8)
    for width in (8, 64, 24):
        x = s.call(aten.gelu.default, Ref(s.linear(x, width)))
    return s.graph(s.call(aten.sum.default, Ref(x)))


def wide() -> Graph:
    """So much work in unequal layers that H100s may share it."""
    s = Script()
    x = s.user(64, 256)
    for width in (256, 2048, 128, 512):
        x = s.call(aten.gelu.default, Ref(s.linear(x, width)))
    return s.graph(s.call(aten.sum.default, Ref(x)))


def found_for(**asked: Any) -> FoundPlan:
    return search(wide(), CLUSTER, Request(**PLAIN, **asked))


STEPS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batches": 4},
    {"pipeline_ranks": 2, "micro_batches": 4},
    {"pipeline_ranks": 2, "micro_batches": 4, "schedule": None},
    {"memory": 20_000_000},
)


@pytest.mark.slow
@pytest.mark.parametrize("asked", STEPS, ids=str)
def test_a_gap_is_that_of_a_plans_seconds_to_its_bound(asked: dict[str, Any]) -> None:
    """Seconds are summed anew, or simulated anew, from the program or the stages that the plan has."""
    found = found_for(**asked)
    plan, step = found.plan, found.step
    if plan.pipeline.is_staged:
        seconds = simulate(order_of(plan.pipeline), plan.stage_costs).seconds
    else:
        seconds = PricedProgram(found.prices, plan.program).cost.of(asked.get("micro_batches", 1))
    assert plan.step_seconds == pytest.approx(seconds, rel=CLOSE)
    assert 0 < step.bound <= seconds * (1 + CLOSE)
    assert plan.gap == pytest.approx(1 - step.bound / seconds, abs=CLOSE)
    assert plan.status != "optimal" or plan.gap <= Request().gap


def test_the_gap_of_a_step_by_hand() -> None:
    step = found_for(mesh=Mesh((4,)), force=Parallelism.BATCH).step
    for seconds, bound, gap in ((10.0, 8.0, 0.2), (10.0, 10.0, 0.0), (8.0, 10.0, 0.0), (0.0, 0.0, 0.0)):
        assert replace(step, seconds=seconds, bound=bound).gap == pytest.approx(gap)
        assert replace(step.solution, seconds=seconds, bound=bound).gap == pytest.approx(gap)


def test_the_bound_of_a_step_counts_every_micro_batch() -> None:
    """What is done once has its share in the seconds of each, but for what hides."""
    step = found_for(mesh=Mesh((4,)), micro_batches=4).step
    assert step.seconds == pytest.approx(4 * step.solution.seconds - step.cost.hidden)
    assert step.bound >= 4 * step.solution.bound * (1 - CLOSE)  # another multiplier may bound it closer


def test_sums_of_gradients_hide_behind_a_part_of_the_backward_pass_on_gpus_alone() -> None:
    """Forced batch parallelism sums every gradient: on H100s half of backward hides it, on CPUs none."""
    for device, part in (("h100", 0.5), ("cpu", 0.0)):
        cluster = replace_device(CLUSTER, device)
        request = Request(**PLAIN, mesh=Mesh((4,)), force=Parallelism.BATCH)
        cost = search(wide(), cluster, request).step.cost
        assert cost.summed > 0
        assert 0 <= cost.hidden <= min(cost.summed, part * cost.backward)
        assert cost.of(3) == pytest.approx(3 * cost.micro_batch + cost.sync - cost.hidden + cost.update)
        assert (cost.hidden > 0) == (part > 0)


def replace_device(cluster: ClusterSpec, device: str) -> ClusterSpec:
    return ClusterSpec(devices_per_node=cluster.devices_per_node, device=device, intra=cluster.intra)


def test_a_step_whose_sums_may_hide_is_near_its_bound() -> None:
    """What is left is the gap of a program with whole numbers to its multipliers."""
    for asked in ({}, {"micro_batches": 4}, {"memory": 20_000_000}):
        step = found_for(mesh=Mesh((4,)), **asked).step
        assert step.bound <= step.seconds <= 1.05 * step.bound


def test_memory_is_replayed_once_for_all_multipliers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best assignment of all that were found fits, others need not."""
    replays: list[object] = []
    monkeypatch.setattr(
        priced_program, "peak_memory", lambda priced: replays.append(priced) or peak_memory(priced)
    )
    problem = MeshProblem(
        unequal(), Mesh((4,)), CLUSTER, CostModel.of(CLUSTER, None), Request(**PLAIN), 10**12, CLUSTER.intra
    )
    step = problem.plan(problem.ask(cap=problem.cap))
    assert len(problem.solved) > 1
    assert [step.peak_bytes] == [each.peak.nbytes for each in replays]  # type: ignore[attr-defined]


def deep(layers: int, width: int, rows: int) -> Graph:
    """Equal layers, one after the other."""
    s = Script()
    x = s.user(rows, width)
    for _ in range(layers):
        x = s.call(aten.gelu.default, Ref(s.linear(x, width)))
    return s.graph(s.call(aten.sum.default, Ref(x)))


def test_unlike_blocks_that_cannot_be_told_apart_are_passed_over_and_said() -> None:
    """Some split otherwise than the others would make the step 2.5 % shorter, by estimates."""
    slow = ClusterSpec(devices_per_node=4, device="h100", intra=Link(1e-9, 1e10))
    found = search(deep(24, 512, 1024), slow, Request(measure=False, mesh=Mesh((4,))))
    passed, step = found.step.passed, found.step
    assert passed is not None and 0.97 * step.seconds < passed.seconds < step.seconds
    assert step.bound == passed.bound
    rows = {row.name: row for row in found.plan.alternatives}
    assert rows["unlike blocks"].step_seconds == passed.seconds
    assert "which predictions can't tell from nothing" in rows["unlike blocks"].reason


def test_the_bound_over_several_meshes_is_the_least_of_theirs() -> None:
    found = found_for()
    single = [found_for(mesh=mesh) for mesh in CLUSTER.meshes()]
    assert len(single) > 1
    assert found.step.seconds == min(each.step.seconds for each in single)
    assert found.step.bound == pytest.approx(min(each.step.bound for each in single), rel=2e-3)
    assert all(found.step.bound <= each.step.seconds for each in single)


def forced_plans(stages: int, kinds: Sequence[ScheduleKind]) -> Iterator[float]:
    """Seconds of every pure strategy on every mesh under every schedule, where there is such a plan."""
    for force, mesh, kind in itertools.product(Parallelism, CLUSTER.stage(stages).meshes(), kinds):
        asked = {"force": force, "mesh": mesh, "schedule": kind, "pipeline_ranks": stages, "micro_batches": 4}
        with contextlib.suppress(AutoparError):
            yield found_for(**asked).plan.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "kinds"),
    [(1, KINDS[:1]), (2, KINDS), pytest.param(2, tuple(ScheduleKind), marks=pytest.mark.long)],
    ids=str,
)
def test_no_forced_plan_of_unequal_blocks_beats_the_bound(
    stages: int, kinds: tuple[ScheduleKind, ...]
) -> None:
    plan = found_for(pipeline_ranks=stages, micro_batches=4, schedule=None).plan
    others = list(forced_plans(stages, kinds))
    assert len(others) >= 4
    assert plan.step_seconds * (1 - plan.gap) <= min(others) * (1 + CLOSE)
    assert plan.step_seconds <= min(others) * (1 + CLOSE)


def small_problem(seed: int, kinds: tuple[ScheduleKind, ...]) -> tuple[MeshProblem, list[Program]]:
    """Two stages of two devices, and every program of a small space."""
    graph, random = unequal(), Random(seed)
    known = random_prices(graph, Mesh((2,)), random)
    request = Request(pipeline_ranks=2, micro_batches=4, schedule=kinds[0], gap=1e-9, **PLAIN)
    problem = MeshProblem(graph, Mesh((2,)), known.cluster, known.model, request, None, HOP)
    problem.folding = unfolded(graph)
    problem.schedules = [scheduled(kind, 2, stages_per_rank(kind), 4) for kind in kinds]
    space = problem.spaces[None] = small_space(graph, problem.prices, random, most=2, layouts=1)
    return problem, [program for _, program in BruteForce(graph, problem.prices, space).programs()]


def fastest(problem: MeshProblem, programs: Sequence[Program]) -> float:
    """Seconds of the fastest of all programs, cuts and schedules."""
    count, every = len(problem.graph.operators), list[float]()
    for program in programs:
        table = intervals(PricedProgram(problem.prices, program), HOP, places=range(count + 1))
        for schedule in problem.schedules:
            every += [cut_at(table, schedule, (0, start)).seconds for start in range(1, count)]
    return min(every)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_no_placement_and_no_cut_beats_the_bound_under_any_of_several_schedules(seed: int) -> None:
    problem, programs = small_problem(seed, KINDS)
    found, best = problem.plan(problem.ask()), fastest(problem, programs)
    assert best * (1 - CLOSE) <= found.seconds
    assert 0 < found.bound <= best * (1 + CLOSE)
    assert found.gap == pytest.approx(1 - found.bound / found.seconds, abs=CLOSE)


def test_a_plan_that_another_beats_has_a_bound_that_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing near the fastest placement is looked at, one that can be cut more evenly is missed."""
    monkeypatch.setattr("autopar.planning.staged_step.is_worthwhile", lambda *args, **how: False)
    problem, programs = small_problem(9, (ScheduleKind.ONE_F_ONE_B,))
    found, best = problem.plan(problem.ask()), fastest(problem, programs)
    assert found.seconds > 1.01 * best
    assert 0 < found.bound <= best * (1 + CLOSE)


def test_a_mesh_without_a_plan_in_time_leaves_the_gap_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its best plan may take any time less than what is known of the other meshes."""
    patient = MeshProblem.plan

    def hasty(problem: MeshProblem, *args: Any, **how: Any) -> Step:
        if problem.mesh == Mesh((4,)):
            raise SolverError(where="solver", found="no plan in time", wanted="one", remedy="wait")
        return patient(problem, *args, **how)

    assert found_for().plan.gap < 0.05
    monkeypatch.setattr(MeshProblem, "plan", hasty)
    plan = found_for().plan
    assert plan.gap == 1
    assert plan.status != "optimal"
