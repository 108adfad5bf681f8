"""Stages, micro-batches and schedule are chosen, or refused with a reason."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import plan
from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import OptimizerState
from autopar.core.force import Parallelism
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.schedule import ScheduleKind
from autopar.cost.machine.model import CostModel
from autopar.errors import InfeasibleError, InputError, SolverError, TraceError
from autopar.planning.apart import Apart, error_of, unlike
from autopar.planning.asked.ask import SearchMeans
from autopar.planning.asked.request import Request
from autopar.planning.estimates import PipelineEstimate
from autopar.planning.pipeline_search import BatchGraphs, _few, decide_all
from autopar.planning.screening import ROUGH, Screen, ScreenedMesh
from autopar.planning.search import MeshDecision, _prefer_simpler, decide, finish, search
from autopar.results.plan.plan import Alternative
from autopar.solve.program.solution import CutoffError, Solution, check_cutoff
from autopar.solve.stages import step
from autopar.solve.stages.step import Step
from autopar.trace.export import trace
from autopar.trace.forms.simplify import only_loss
from examples.characters import gpt

BATCH = 16
CLUSTER = ClusterSpec(
    nodes=4, devices_per_node=1, device="h200", intra=Link(2e-6, 450e9), inter=Link(5e-6, 5e9)
)
AUTO: dict[str, Any] = {"measure": False, "alternatives": False, "schedule": None}
OPEN = Request(**AUTO)


@lru_cache
def graph_of(micro_batches: int) -> Graph:
    with torch.device("meta"):
        model = gpt(4, 1024, 8, 256, 256)
        tokens = torch.zeros(BATCH // micro_batches, 256, dtype=torch.long)
    return only_loss(trace(model, (tokens, tokens), {}).graph)


@pytest.mark.slow
def test_what_is_chosen_is_no_slower_than_what_could_have_been_asked_for() -> None:
    """Over slow links stages pay, and splitting every layer doesn't."""
    chosen = finish(decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN)).plan
    assert chosen.pipeline.is_staged
    for stages, count, kind in ((1, 1, None), (2, 4, ScheduleKind.ONE_F_ONE_B), (4, 8, ScheduleKind.GPIPE)):
        asked = Request(
            measure=False, alternatives=False, pipeline_ranks=stages, micro_batches=count, schedule=kind
        )
        assert chosen.step_seconds <= search(graph_of(count), CLUSTER, asked).plan.step_seconds


@pytest.mark.long
def test_without_stages_no_micro_batch_has_fewer_samples_than_there_are_devices() -> None:
    """Else batch parallelism, the best plan over such links, would not be among what is screened."""
    fast = ClusterSpec(devices_per_node=4, device="h200", intra=Link(2e-6, 450e9))
    found = finish(decide_all(BatchGraphs(graph_of, BATCH), fast, OPEN)).plan
    alone = search(graph_of(1), fast, Request(measure=False, alternatives=False)).plan
    assert found.step_seconds <= alone.step_seconds * (1 + ROUGH)  # meshes are compared by estimates


@pytest.mark.parametrize(("measure", "planned"), [(True, [1, 4, 2]), (False, [1, 4])])
def test_measured_plans_may_be_faster_than_estimates_of_others(
    monkeypatch: pytest.MonkeyPatch, measure: bool, planned: list[int]
) -> None:
    """So what an estimate puts a little behind them is planned, too."""
    local, asked = ClusterSpec.local(4), list[int]()
    seconds = {4: 1.0, 1: 0.8, 2: 0.7}  # of plans
    estimates = {4: 0.6, 1: 0.7, 2: 1.1}

    def choices(self: Screen, ranks: int | None) -> list[PipelineEstimate]:
        self.model = CostModel.of(local, None)
        return [PipelineEstimate(ranks, Mesh((4 // ranks,)), 4, estimates[ranks], 0.0) for ranks in estimates]

    def decided(
        graph: Graph, cluster: ClusterSpec, request: Request, means: SearchMeans, **_: Any
    ) -> MeshDecision:
        asked.append(request.pipeline_ranks)
        step: Any = SimpleNamespace(seconds=seconds[request.pipeline_ranks], recomputes=False)
        nothing: Any = SimpleNamespace(mesh=Mesh((4,)))
        return MeshDecision(nothing, step, cluster, request, None)

    monkeypatch.setattr(Screen, "choices", choices)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide", decided)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide_first", lambda *_, **__: None)
    found = decide_all(BatchGraphs(graph_of, BATCH), local, replace(OPEN, measure=measure))
    assert asked == planned and found.step.seconds == min(seconds[ranks] for ranks in planned)


@pytest.mark.parametrize(("nbytes", "planned"), [(0.0, [4, 2, 1]), (math.inf, [4, 2])])
def test_the_simplest_choice_that_fits_is_planned_whatever_its_estimate(
    monkeypatch: pytest.MonkeyPatch, nbytes: float, planned: list[int]
) -> None:
    """An estimate may be wrong by more than any margin; a plan that can't be faster is left at its bound."""
    cutoffs: dict[int, float] = {}

    def choices(self: Screen, ranks: int | None) -> list[PipelineEstimate]:
        self.cap = 1.0
        sizes = {4: (1.0, 0.0), 2: (1.0, 0.0), 1: (9.0, nbytes)}
        return [PipelineEstimate(each, Mesh((4 // each,)), 4, *size) for each, size in sizes.items()]

    def decided(
        graph: Graph, cluster: ClusterSpec, request: Request, means: SearchMeans, *, cutoff: float
    ) -> MeshDecision:
        cutoffs[request.pipeline_ranks] = cutoff
        return decision_of(request.pipeline_ranks, 4, {4: 2.0, 2: 2.0, 1: 1.0}[request.pipeline_ranks])

    monkeypatch.setattr(Screen, "choices", choices)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide", decided)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide_first", lambda *_, **__: None)
    found = decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN)
    fastest = 1 if nbytes == 0 else 2
    assert list(cutoffs) == planned and found.request.pipeline_ranks == fastest
    assert cutoffs.get(1, 2.2) == pytest.approx(2.2)


@pytest.mark.parametrize(("estimate", "planned"), [(0.92, [1]), (0.9, [1, 2])])
def test_stages_that_could_not_be_told_from_a_plan_without_are_left_at_their_estimate(
    monkeypatch: pytest.MonkeyPatch, estimate: float, planned: list[int]
) -> None:
    """A step without stages stands for one with them that takes up to 10 % less; a row tells of it."""
    cutoffs: dict[int, float] = {}

    def choices(self: Screen, ranks: int | None) -> list[PipelineEstimate]:
        self.cap = 1.0
        return [
            PipelineEstimate(each, Mesh((4 // each,)), 4, seconds, 0.0)
            for each, seconds in ((2, estimate), (1, 1.2))
        ]

    def decided(
        graph: Graph, cluster: ClusterSpec, request: Request, means: SearchMeans, *, cutoff: float
    ) -> MeshDecision:
        cutoffs[request.pipeline_ranks] = cutoff
        return decision_of(request.pipeline_ranks, 4, {2: 0.95, 1: 1.0}[request.pipeline_ranks])

    monkeypatch.setattr(Screen, "choices", choices)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide", decided)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide_first", lambda *_, **__: None)
    found = decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN)
    assert list(cutoffs) == planned and found.request.pipeline_ranks == 1
    assert cutoffs.get(2, 1 / 1.1) == pytest.approx(1 / 1.1)
    (row,) = found.passed
    by_estimate = planned == [1]
    assert row.step_seconds == (estimate if by_estimate else 0.95)
    assert (" by its estimate" in row.reason) is by_estimate


@pytest.mark.parametrize(
    ("seconds", "planned"),
    [
        (0.88, [(1, 0.99), (2, math.inf)]),
        (0.95, [(1, 0.99), (2, math.inf), (1, 1.045)]),
        (math.inf, [(1, 0.99), (2, math.inf), (1, math.inf)]),
    ],
)
def test_a_step_without_stages_waits_where_those_beat_its_bound_if_they_keep_what_they_promise(
    monkeypatch: pytest.MonkeyPatch, seconds: float, planned: list[tuple[int, float]]
) -> None:
    """Its bound is 1: it is planned after all if stages take longer than that allows, or don't fit."""
    cutoffs = list[tuple[int, float]]()

    def choices(self: Screen, ranks: int | None) -> list[PipelineEstimate]:
        self.cap = 1.0
        return [PipelineEstimate(each, Mesh((4 // each,)), 4, {2: 0.9, 1: 1.2}[each], 0.0) for each in (2, 1)]

    def decided(
        graph: Graph, cluster: ClusterSpec, request: Request, means: SearchMeans, *, cutoff: float
    ) -> MeshDecision:
        cutoffs.append((request.pipeline_ranks, cutoff))
        if request.pipeline_ranks == 1:
            check_cutoff(1.0, cutoff)
            return decision_of(1, 4, 1.2)
        if seconds == math.inf:
            raise InfeasibleError(where="stages", found="too much", wanted="less", remedy="others")
        return decision_of(2, 4, seconds)

    monkeypatch.setattr(Screen, "choices", choices)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide", decided)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide_first", lambda *_, **__: None)
    found = decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN)
    assert cutoffs == [(ranks, pytest.approx(cutoff)) for ranks, cutoff in planned]
    assert found.request.pipeline_ranks == (1 if seconds == math.inf else 2)


@pytest.mark.parametrize(("seconds", "planned"), [(0.95, [8]), (1.0, [8, 4])])
def test_with_stages_the_fastest_is_planned_before_the_simplest_that_promises_hardly_less(
    monkeypatch: pytest.MonkeyPatch, seconds: float, planned: list[int]
) -> None:
    """Beside its plan 4 micro-batches instead of 8 may promise too little."""
    counts = list[int]()

    def choices(self: Screen, ranks: int | None) -> list[PipelineEstimate]:
        self.cap = 1.0
        return [PipelineEstimate(2, Mesh((2,)), each, {8: 1.0, 4: 1.02}[each], 0.0) for each in (8, 4)]

    def decided(
        graph: Graph, cluster: ClusterSpec, request: Request, means: SearchMeans, **_: Any
    ) -> MeshDecision:
        counts.append(request.micro_batches)
        return decision_of(2, request.micro_batches, {8: seconds, 4: 1.02}[request.micro_batches])

    monkeypatch.setattr(Screen, "choices", choices)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide", decided)
    monkeypatch.setattr("autopar.planning.pipeline_search.decide_first", lambda *_, **__: None)
    found = decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN)
    assert counts == planned and found.request.micro_batches == planned[-1]


def decision_of(stages: int, count: int, seconds: float, *, recomputes: bool = False) -> MeshDecision:
    nothing: Any = SimpleNamespace(mesh=Mesh((4,)))
    step: Any = SimpleNamespace(seconds=seconds, schedule=None, peak_bytes=0, recomputes=recomputes)
    return MeshDecision(nothing, step, CLUSTER, Request(pipeline_ranks=stages, micro_batches=count), None)


@pytest.mark.parametrize(
    ("measured", "plans", "taken"),
    [
        (False, [(8, 16, 1.0), (1, 1, 1.09)], (1, 1)),  # estimates of stages may be wrong by that
        (False, [(8, 16, 1.0), (1, 1, 1.11)], (8, 16)),
        (True, [(8, 16, 1.0), (1, 1, 1.09)], (8, 16)),
        (True, [(8, 16, 1.0), (1, 1, 1.02)], (1, 1)),
        (False, [(4, 16, 1.0), (4, 8, 1.02), (4, 4, 1.04)], (4, 8)),  # fewer micro-batches
        (False, [(1, 4, 1.0), (1, 2, 1.02), (2, 2, 0.99)], (1, 2)),
    ],
)
def test_between_plans_that_can_not_be_told_apart_the_simpler_stands(
    measured: bool, plans: list[tuple[int, int, float]], taken: tuple[int, int]
) -> None:
    apart = Apart(measured=measured)
    for order in (plans, plans[::-1]):
        best = apart.simplest([decision_of(*each) for each in order])
        assert (best.request.pipeline_ranks, best.request.micro_batches) == taken


@pytest.mark.parametrize(("seconds", "ranks"), [(1.21, 1), (1.23, 8)])
def test_a_model_that_fits_on_one_device_is_cut_where_stages_promise_more_than_both_are_off_by(
    seconds: float, ranks: int
) -> None:
    """1.1 / 0.9 = 1.222."""
    apart = Apart(measured=False, is_roomy=True)
    best = apart.simplest([decision_of(8, 16, 1.0), decision_of(1, 1, seconds)])
    assert best.request.pipeline_ranks == ranks
    stages, alone = (
        PipelineEstimate(ranks, Mesh((1,)), 16, each, 0.0) for ranks, each in ((8, 1.0), (1, seconds))
    )
    assert (stages.seconds < apart.limit(stages, alone)) == (ranks == 8)


def test_what_a_more_complicated_plan_would_promise_is_told() -> None:
    passed = Apart(measured=False).passed(decision_of(8, 16, 0.95), decision_of(1, 1, 1.0))
    assert passed.name == "8 stages, 16 micro-batches" and passed.step_seconds == 0.95
    assert passed.reason.startswith("promises 5.0% less")
    again = Apart(measured=False).passed(decision_of(1, 2, 0.95, recomputes=True), decision_of(1, 4, 1.0))
    assert again.name == "2 micro-batches, recomputing"


@pytest.mark.parametrize(("slower", "recomputes"), [(1.02, False), (1.04, True)])
def test_more_micro_batches_stand_before_what_is_computed_again(slower: float, recomputes: bool) -> None:
    fewer, more = decision_of(1, 2, 1.0, recomputes=True), decision_of(1, 4, slower)
    assert Apart(measured=False).simplest([fewer, more]).step.recomputes == recomputes


@pytest.mark.parametrize(
    ("cluster", "simple"),
    [
        (ClusterSpec(devices_per_node=4, device="h200", memory="80GB", intra=Link(2e-6, 450e9)), True),
        (ClusterSpec(devices_per_node=4, device="h200", memory="1GB", intra=Link(2e-6, 450e9)), False),
        (ClusterSpec(devices_per_node=4, device="h200", memory="80GB", intra=Link(2e-6, 32e9)), False),
        (ClusterSpec.local(4), False),
    ],
)
def test_models_that_fit_on_one_device_of_a_node_with_fast_links_have_no_stages(
    cluster: ClusterSpec, simple: bool
) -> None:
    """Its weights and their state take 0.81 GB: at 1 GB there is no room beside them."""
    screen = Screen(graph_of, [1, 2, 4, 8, 16], BATCH, cluster, OPEN, None)
    assert screen.is_simple() == simple


def nodes(inter: float) -> ClusterSpec:
    """Two nodes of two devices, whose links to each other make so many bytes/s."""
    return ClusterSpec(
        nodes=2, devices_per_node=2, device="a100", intra=Link(2e-6, 450e9), inter=Link(5e-6, inter)
    )


@pytest.mark.parametrize(("inter", "ranks"), [(400e9, {1}), (5e9, {1, 2, 4})])
def test_over_several_nodes_stages_are_looked_at_only_where_they_could_spare_more_than_predictions_are_off_by(
    inter: float, ranks: set[int]
) -> None:
    """Of a model that would fit on one device even by far."""
    screen = Screen(graph_of, [1, 2, 4, 8, 16], BATCH, nodes(inter), OPEN, None)
    assert {choice.ranks for choice in screen.choices(None)} == ranks
    assert any("no stages" in note for note in screen.notes) == (ranks == {1})


@pytest.mark.parametrize(("memory", "roomy"), [("80GB", True), ("1.3GB", False)])
def test_stages_of_a_model_that_fits_on_one_device_are_looked_at_where_they_could_spare_more(
    memory: str, roomy: bool
) -> None:
    """Over so slow links a step takes 1.15 times as long as what all devices compute of it."""
    cluster = replace(nodes(6.5e9), memory=memory)
    screen = Screen(graph_of, [1, 2, 4, 8, 16], BATCH, cluster, OPEN, None)
    screen.apart = replace(screen.apart, is_roomy=screen.is_roomy())
    assert screen.is_even(screen.unstaged()) == screen.apart.is_roomy == roomy


@pytest.mark.parametrize(("inter", "shapes"), [(400e9, [(4,)]), (5e9, [(4,), (2, 2)])])
def test_meshes_of_more_axes_are_looked_at_only_where_one_axis_leaves_something_to_spare(
    monkeypatch: pytest.MonkeyPatch, inter: float, shapes: list[tuple[int, ...]]
) -> None:
    seen: list[tuple[int, ...]] = []
    screened = Screen.screened

    def spy(self: Screen, problem: Any, solution: Any, ranks: int, sample: Any) -> Any:
        seen.append(problem.mesh.shape)
        return screened(self, problem, solution, ranks, sample)

    monkeypatch.setattr(Screen, "screened", spy)
    plain = replace(OPEN, optimizer=OptimizerState(0.0))  # no update in shards to be gained
    Screen(graph_of, [1], BATCH, nodes(inter), plain, None).screen(1)
    assert list(dict.fromkeys(seen)) == shapes


class SoughtError(Exception):
    """Step plans were to be sought."""


@pytest.mark.slow
def test_micro_batches_without_stages_are_sought_only_where_memory_is_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seek(*args: Any, **kwargs: Any) -> Any:
        raise SoughtError

    monkeypatch.setattr("autopar.planning.planner.decide_all", seek)
    tokens = torch.zeros(8, 32, dtype=torch.long)
    model, cluster = gpt(1, 32, 2, 32, 32), ClusterSpec(devices_per_node=2, device="h200")
    options: dict[str, Any] = {"mesh": "2", "measure": False}
    roomy = plan(model, cluster, (tokens, tokens), **options)
    assert roomy.pipeline.micro_batches == 1
    with pytest.raises(SoughtError):
        plan(model, cluster, (tokens, tokens), memory=int(0.7 * roomy.peak_bytes), **options)


def test_a_plan_that_cannot_beat_a_known_one_is_not_sought() -> None:
    for request in (Request(**AUTO), Request(**AUTO, pipeline_ranks=2, micro_batches=4)):
        graph = graph_of(request.micro_batches)
        known = decide(graph, CLUSTER, request).step
        assert decide(graph, CLUSTER, request, cutoff=2 * known.seconds).step.seconds == known.seconds
        with pytest.raises(CutoffError, match="less than"):
            decide(graph, CLUSTER, request, cutoff=known.seconds / 2)


@pytest.mark.parametrize("slower", [1.02, 1.09, 1.11])
def test_a_pure_strategy_stands_beside_a_mixed_plan_that_estimates_cannot_tell_from_it(slower: float) -> None:
    decision = decide(graph_of(1), ClusterSpec(devices_per_node=2, device="h200"), Request(**AUTO))
    problem, best = decision.problem, decision.step
    other = problem.plan(problem.ask(Parallelism.CHANNEL)).solution  # does all but views otherwise
    apart = unlike(best.solution.priced, other.program)

    def chosen(solution: Solution, kind: str = "batch") -> Step:
        pure = replace(best, seconds=slower * best.seconds, solution=solution)
        row = Alternative(kind, pure.seconds, pure.peak_bytes, feasible=True)
        return _prefer_simpler((problem, best), [(row, pure)])[1]

    assert 0.5 < apart < 1
    assert chosen(best.solution) == best  # what does the same is wrong alike: it would be slower
    assert (chosen(other) == best) == (slower >= 1 + 0.1 * apart)
    assert chosen(other, "channel") == best  # model parallelism is mixed by experts, too
    assert chosen(other).bound == best.bound  # on all plans, whichever is taken


def test_of_pure_strategies_the_fastest_stands_also_where_it_is_the_plan_itself() -> None:
    decision = decide(graph_of(1), ClusterSpec(devices_per_node=2, device="h200"), Request(**AUTO))
    problem, best = decision.problem, decision.step
    other = problem.plan(problem.ask(Parallelism.CHANNEL)).solution
    steps = [best, replace(best, seconds=1.01 * best.seconds, solution=other)]
    rows = [(Alternative("batch", each.seconds, each.peak_bytes, feasible=True), each) for each in steps]
    assert _prefer_simpler((problem, best), rows)[1].seconds == best.seconds


def test_what_is_measured_is_told_apart_sooner() -> None:
    assert (error_of(0.0), error_of(1.0)) == (0.1, 0.03)
    assert error_of(0.5) == pytest.approx(0.065)


def test_a_mesh_of_fewer_axes_stands_where_more_promise_hardly_anything() -> None:
    cluster = ClusterSpec(devices_per_node=4, device="a100", memory="80GB", intra=Link(2e-6, 450e9))
    found = finish(decide_all(BatchGraphs(graph_of, BATCH), cluster, OPEN)).plan
    assert found.mesh == Mesh((4,))


@pytest.mark.parametrize(
    ("promised", "told"), [(1.0, ()), (0.9995, ()), (0.975, ("mesh 2x2 promises 2.5%",))]
)
def test_a_mesh_that_is_left_out_is_told_with_what_it_promises(
    promised: float, told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.planning.screening.margin", lambda *_: 0.03)

    def placed(seconds: float, mesh: Mesh) -> ScreenedMesh:
        screened: Any = SimpleNamespace(ranks=1, seconds=seconds)
        problem: Any = SimpleNamespace(mesh=mesh)
        solution: Any = SimpleNamespace(program=0, priced=0)
        return ScreenedMesh((screened,), problem, solution)

    found = [placed(seconds, mesh) for seconds, mesh in ((1.0, Mesh((4,))), (promised, Mesh((2, 2))))]
    screen: Any = SimpleNamespace(
        place=lambda placed: (0.0, placed.screened[0].seconds), cluster=SimpleNamespace(nodes=1), left_out={}
    )
    Screen.simpler(screen, found)
    notes = screen.left_out.get(1, ())
    assert [note[: len(start)] for note, start in zip(notes, told, strict=True)] == list(told)


def test_a_cut_is_refined_around_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(**AUTO | {"schedule": ScheduleKind.ONE_F_ONE_B}, pipeline_ranks=2, micro_batches=4)
    best = decide(graph_of(4), CLUSTER, request).step
    monkeypatch.setattr(step, "MOST_CUT_PLACES", 3)
    decision = decide(graph_of(4), CLUSTER, request)
    refined = decision.problem.refined(decision.step)
    assert decision.step.seconds > refined.seconds >= best.seconds
    assert refined.seconds == pytest.approx(best.seconds, rel=0.02)
    assert refined.bound <= refined.seconds


def test_what_is_asked_for_is_kept() -> None:
    request = Request(measure=False, alternatives=False, schedule=ScheduleKind.GPIPE)
    plan = finish(decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, request, ranks=2)).plan
    assert (plan.pipeline.ranks, plan.pipeline.schedule) == (2, ScheduleKind.GPIPE)
    plan = finish(decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN, micro_batches=4)).plan
    assert plan.pipeline.micro_batches == 4


@pytest.mark.long
def test_a_plan_meets_the_cap_or_the_least_is_told() -> None:
    fastest = finish(decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN)).plan
    cap = fastest.peak_bytes * 9 // 10
    tight = finish(decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, Request(**AUTO, memory=cap))).plan
    assert tight.peak_bytes <= cap
    assert tight.step_seconds >= fastest.step_seconds * (1 - fastest.gap)
    with pytest.raises(InfeasibleError) as caught:
        decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, Request(**AUTO, memory=1 << 20))
    assert caught.value.least is not None and caught.value.least > 1 << 20
    assert "micro-batches" in str(caught.value)


def test_numbers_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="as many as stages"):
        search(
            graph_of(2),
            CLUSTER,
            Request(**AUTO | {"schedule": ScheduleKind.ONE_F_ONE_B}, pipeline_ranks=4, micro_batches=2),
        )
    with pytest.raises(InputError, match="equal parts"):
        decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN, ranks=3)


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_one_after_the_other_cost_what_is_repeated_and_what_is_not(count: int) -> None:
    request = Request(measure=False, alternatives=False, micro_batches=count, mesh=Mesh((4,)))
    found = search(graph_of(count), CLUSTER, request)
    cost = found.step.cost
    assert found.plan.step_seconds == pytest.approx(count * cost.micro_batch + cost.exposed + cost.update)
    assert found.plan.gap <= 0.1  # by what sums of gradients may hide behind backward
    whole = search(graph_of(1), CLUSTER, Request(measure=False, alternatives=False, mesh=Mesh((4,)))).plan
    assert found.plan.peak_bytes < whole.peak_bytes


def total(output: Tensor) -> Tensor:
    return output.sum()


class Scores(nn.Module):
    """Returns its loss, and scores of 16 MiB that its loss is made of, as is its weight of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 65536)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.layer(x)
        return {"loss": scores.sum(), "scores": scores}


def test_where_outputs_beside_the_loss_do_not_fit_the_batch_is_parted() -> None:
    """Parts of it give the loss alone; scores are whole on every device, their columns needn't be."""
    cluster, batch = ClusterSpec(devices_per_node=2, device="h200"), torch.zeros(64, 4)
    ask = partial(plan, Scores(), cluster, batch, mesh="2", measure=False, optimizer="sgd")
    roomy = ask()
    assert roomy.pipeline.micro_batches == 1
    scarce = ask(memory=(cap := roomy.peak_bytes * 4 // 5))
    assert scarce.pipeline.micro_batches > 1 and scarce.peak_bytes <= cap


def test_a_mesh_whose_program_takes_too_long_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mesh is waited for."""
    monkeypatch.setattr("autopar.planning.screening.SCREEN_WORK", 1e-9)
    monkeypatch.setattr("autopar.solve.highs.LEAST_ITERATIONS", 1)
    cluster = ClusterSpec(devices_per_node=4, device="h100", intra=Link(2e-6, 450e9))
    found = decide_all(BatchGraphs(graph_of, BATCH), cluster, OPEN, ranks=1)
    left = [note for note in found.notes if "takes too long" in note]
    assert left and found.problem.mesh.shape == (4,) and "mesh 2x2" in left[0]


@pytest.mark.parametrize(("known", "searches"), [(1 << 40, 1), (0, 2)])
def test_a_model_far_beyond_the_cap_is_not_sought_again_without_its_outputs(
    monkeypatch: pytest.MonkeyPatch, known: int, searches: int
) -> None:
    """What would do is known to be `known` more bytes than the cap, which the outputs don't come to."""
    sought, memory = list[Graph | None](), 2_000_000

    def refused(batch: BatchGraphs, *_: Any, **__: Any) -> MeshDecision:
        sought.append(batch.at_once)
        raise InfeasibleError(
            where="cap", found="2 MB", wanted="more", remedy="raise it", least=memory + known
        )

    monkeypatch.setattr("autopar.planning.planner.decide_all", refused)
    with pytest.raises(InfeasibleError):
        plan(
            Scores(),
            ClusterSpec(devices_per_node=2, device="h200"),
            torch.zeros(64, 4),
            measure=False,
            memory=memory,
            optimizer="sgd",
        )
    assert len(sought) == searches


@pytest.mark.parametrize("limit", [1e-3, pytest.param(2.0, marks=pytest.mark.long)])
def test_a_time_limit_ends_the_search_with_what_is_known_or_says_that_there_is_nothing(limit: float) -> None:
    """A mesh that was not looked at leaves the gap open."""
    graph, cluster = graph_of(1), ClusterSpec(devices_per_node=4, device="h200")
    best = min(decide(graph, cluster, Request(**AUTO, mesh=mesh)).step.seconds for mesh in cluster.meshes())
    try:
        found = decide(graph, cluster, Request(**AUTO, time_limit=limit))
    except SolverError as error:
        assert error.exit_code == 3
        return
    assert found.step.bound <= best * (1 + 1e-9) <= found.step.seconds * (1 + 2e-9)
    assert limit > 1 or found.step.bound == 0.0


def test_micro_batches_are_chosen_only_where_they_change_no_numbers() -> None:
    """A batch norm takes the batch as a whole, unless micro-batches are asked for."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    batch = torch.randn(8, 64)
    ask = partial(plan, model, ClusterSpec.local(2), batch, loss_fn=total, measure=False)
    found = ask()
    assert found.pipeline.micro_batches == 1
    assert "1 (aten.batch_norm.default) takes samples together: one micro-batch" in str(found.notes)
    assert "of every micro-batch by itself" in str(ask(micro_batches=2).notes)
    with pytest.raises(InfeasibleError, match="allow micro-batches .* takes samples together"):
        ask(memory=1000)


class Started(nn.Module):
    """A recurrent layer whose first state is as long as the batch, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4, batch_first=True)
        self.register_buffer("state", torch.randn(1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, self.state)[0]
        return out


class Offset(nn.Module):
    """A row for each sample; a single sample would get them all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rows", torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + self.rows)


@pytest.mark.parametrize(("model", "shape"), [(Started(), (4, 3, 4)), (Offset(), (4, 4))])
def test_a_model_that_takes_its_whole_batch_alone_has_one_micro_batch(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    ask = partial(plan, model, ClusterSpec.local(4), torch.randn(shape), loss_fn=total, measure=False)
    assert ask().pipeline.micro_batches == 1
    with pytest.raises(InputError, match="takes samples together, wanted one in input_0"):
        ask(micro_batches=2)
    said = {"input_0": 0}
    if isinstance(model, Started):
        with pytest.raises(TraceError, match="fewer than 2 micro-batches, if the whole batch can be traced"):
            ask(micro_batches=2, batch_dims=said)


def test_a_batch_of_one_sample_is_told_as_such() -> None:
    model, image = nn.Conv2d(1, 2, 3), torch.randn(1, 1, 8, 8)
    found = plan(model, ClusterSpec.local(2), image, loss_fn=total, measure=False)
    assert any(note.startswith("dim 0 of all inputs has one element") for note in found.notes)
    with pytest.raises(InfeasibleError, match="take a smaller batch, which can't be cut into micro-batches"):
        plan(model, ClusterSpec.local(2), image, loss_fn=total, measure=False, memory=100)


def test_one_device_has_nothing_to_choose_and_no_note_about_it() -> None:
    model, image = nn.Conv2d(1, 2, 3), torch.randn(1, 1, 8, 8)
    found = plan(model, ClusterSpec.local(1), image, loss_fn=total, measure=False)
    assert not [note for note in found.notes if "stages" in note]


def test_rows_for_each_sample_that_stay_when_fewer_come_keep_the_batch_whole() -> None:
    """A single sample would be added to all of them, without an error."""
    found = plan(Offset(), ClusterSpec.local(2), torch.randn(4, 4), loss_fn=total, measure=False)
    assert any("add (aten.add.Tensor) takes samples together" in note for note in found.notes)


@pytest.mark.parametrize(
    ("asked", "way"), [(1, "--micro-batches 2, which asks for train_step"), (4, "--micro-batches 8")]
)
def test_what_is_short_of_memory_is_told_of_micro_batches(asked: int, way: str) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(64, 8)
    ask = partial(plan, model, ClusterSpec.local(2), batch, loss_fn=total, measure=False, stages=1)
    with pytest.raises(InfeasibleError, match=f"cut the batch into micro-batches .{way}"):
        ask(micro_batches=asked, memory=2000)


@pytest.mark.long
def test_labels_that_may_be_ignored_are_no_obstacle_to_micro_batches() -> None:
    """The planner cuts by itself where memory is short, and says what parts count by."""

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.layers(x), y)

    call = (torch.randn(512, 8), torch.arange(512) % 8)
    options = {"measure": False, "stages": 1, "recompute": "none", "schedule": "1f1b"}
    ask = partial(plan, Labelled(), ClusterSpec.local(2), call, **options)
    whole = ask(micro_batches=1)
    found = ask(memory=int(whole.peak_bytes * 0.4))
    assert found.pipeline.micro_batches > 1
    assert any("labels that are kept" in note for note in found.notes)


def test_micro_batches_are_near_one_two_four_and_eight_for_each_rank_and_with_stages_all_between() -> None:
    counts = [1, 2, 3, 4, 6, 9, 20, 31, 33, 50]
    screen = Screen(graph_of, counts, BATCH, CLUSTER, OPEN, None)
    assert screen.micro_batches(1) == [1, 2, 4, 9]
    assert screen.micro_batches(2) == [2, 3, 4, 6, 9, 20, 31]  # from 2 to 32, the nearest to 16 among them
    assert screen.micro_batches(4) == [4, 6, 9, 20, 31, 33, 50]


def test_few_choices_are_planned_two_for_one_number_of_ranks_and_one_without_stages() -> None:
    """In the order of their seconds; the letter is that of the choice, the number its ranks."""

    def planned(*ranks: int) -> list[int]:
        choices = [PipelineEstimate(each, Mesh((2,)), 4, float(place), 0) for place, each in enumerate(ranks)]
        return [int(each.seconds) for each in _few(choices, Apart(measured=True), math.inf)]

    assert planned(2, 2, 2, 4, 8) == [0, 1, 3]
    assert planned(2, 4, 8, 16) == [0, 1, 2]
    assert planned(2, 4, 8, 16, 1, 1) == [0, 1, 2, 4]
    assert planned(1, 1, 1, 2) == [0, 1, 3]


def test_meshes_of_which_none_is_solved_in_time_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: Any, **kwargs: Any) -> Any:
        raise SolverError(where="HiGHS", found="nothing", wanted="an answer", remedy="give more time")

    monkeypatch.setattr(Screen, "placed", late)
    screen = Screen(graph_of, [1, 2], BATCH, CLUSTER, OPEN, None)
    with pytest.raises(SolverError, match="give more time"):
        screen.screen(1)


def test_half_as_many_micro_batches_that_can_not_be_traced_leave_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def graph(count: int) -> Any:
        if count == 2:
            raise TraceError(where="forward", found="two", wanted="others", remedy="choose others")
        return graph_of(count)

    screen = Screen(graph, [1, 2, 4], BATCH, CLUSTER, OPEN, None)
    alone = screen.screen(1, is_probe=True)
    screen.cap = max(each.saved_bytes for each in alone) / 3  # one of four fits
    found = screen.screened_in_parts(alone)
    assert {each.count for each in found} == {4} and screen.fewest == 4


def test_a_count_that_cannot_be_traced_is_tried_once_and_another_choice_steps_in() -> None:
    first = decide_all(BatchGraphs(graph_of, BATCH), CLUSTER, OPEN).request.micro_batches
    tried: list[int] = []

    def untraceable(count: int) -> Graph:
        tried.append(count)
        if count == first:
            raise TraceError(where="micro-batches", found=f"{count}", wanted="parts of the batch", remedy="-")
        return graph_of(count)

    found = decide_all(BatchGraphs(untraceable, BATCH), CLUSTER, OPEN)
    assert found.request.micro_batches != first
    assert found.request.pipeline_ranks > 1
    assert tried.count(first) == 1
    with pytest.raises(TraceError, match=f"found {first}"):
        decide_all(BatchGraphs(untraceable, BATCH), CLUSTER, OPEN, micro_batches=first)


@pytest.mark.parametrize(("memory", "count"), [(None, 1), ("300kB", 4)])
def test_a_forced_kind_takes_micro_batches_where_the_batch_does_not_fit_alone(
    memory: str | None, count: int
) -> None:
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    x = torch.randn(512, 32)
    found = plan(
        nn.Sequential(*layers),
        ClusterSpec.local(2),
        (x, x),
        loss_fn=nn.functional.mse_loss,
        force="batch",
        memory=memory,
        recompute="none",
        measure=False,
    )
    assert found.pipeline.micro_batches == count and found.pipeline.ranks == 1
