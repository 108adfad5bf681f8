"""Plans that are there in seconds, and searches that end early with the best plan until then."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.core.deadline import SearchWatch, after, check_time, left, note_step, say, stop_search, watched
from autopar.core.force import PURE, Parallelism
from autopar.core.mesh import Mesh
from autopar.cost.machine.model import CostModel
from autopar.errors import OutOfTimeError
from autopar.planning.asked.ask import UNLIMITED
from autopar.planning.asked.request import Request
from autopar.planning.first_plans import WholeBatch, first_plan, first_step, fitted_step
from autopar.planning.mesh_search import MeshProblem
from autopar.planning.planner import STOPPED
from autopar.trace.export import trace

NODE = ClusterSpec(devices_per_node=8, device="h100", intra=Link(5e-6, 150e9))


def layers(count: int = 6, width: int = 1024) -> tuple[torch.nn.Module, torch.Tensor]:
    with torch.device("meta"):
        parts = [item for _ in range(count) for item in (torch.nn.Linear(width, width), torch.nn.GELU())]
        return torch.nn.Sequential(*parts, torch.nn.Flatten(0)), torch.zeros(4096, width)


def problem(cap: int | None) -> MeshProblem:
    model, x = layers()
    graph = trace(model, (x,)).graph
    return MeshProblem(graph, Mesh((8,)), NODE, CostModel.of(NODE, None), Request(), cap, NODE.intra)


def test_a_first_plan_keeps_to_the_cap_by_shards_of_state_and_by_recomputing() -> None:
    free = first_step(problem(None), Parallelism.BATCH)
    sharded = first_step(problem(free.peak_bytes - free.state_bytes // 2), Parallelism.BATCH)
    assert sharded.state_bytes < free.state_bytes / 2 and sharded.seconds >= free.seconds
    lean = problem(free.peak_bytes // 2)
    step = first_plan(lean, PURE, UNLIMITED)
    assert step is not None and step.peak_bytes <= free.peak_bytes // 2
    assert step.solution.program.recompute
    assert step.solution.peak.nbytes == step.solution.priced.peak.nbytes  # as it is replayed


def test_a_row_of_the_whole_batch_is_of_the_plans_own_graph() -> None:
    """It has the outputs that the plan has, which cost memory; of parts it is the part's graph."""
    at_once, part = problem(None), problem(None).graph
    batch = WholeBatch(lambda _: part, (2, 4))
    other, _ = fitted_step(at_once, batch, Parallelism.BATCH, NODE, UNLIMITED)
    same, _ = fitted_step(at_once, replace(batch, counts=(1, 2)), Parallelism.BATCH, NODE, UNLIMITED)
    assert same.graph is at_once.graph and other.graph is part


def test_no_first_plan_meets_a_cap_below_the_model() -> None:
    assert first_plan(problem(1000), PURE, UNLIMITED) is None


def test_a_search_under_a_cap_is_no_slower_than_the_first_plan() -> None:
    cap = first_step(problem(None), Parallelism.BATCH).peak_bytes // 2
    first = first_plan(problem(cap), PURE, UNLIMITED)
    assert first is not None
    model, x = layers()
    plan = autopar.plan(model, NODE, x, memory=cap, stages=1, micro_batches=1, mesh="8")
    assert plan.step_seconds <= first.seconds * (1 + 1e-9) and plan.peak_bytes <= cap


@pytest.mark.parametrize("memory", [None, "100MB"])
def test_there_is_a_plan_however_short_the_time(memory: str | None) -> None:
    model, x = layers()
    plan = autopar.plan(model, NODE, x, time_limit=1e-3, memory=memory)
    assert plan.step_seconds > 0


def test_a_search_that_is_stopped_gives_its_best_plan_and_says_so() -> None:
    heard: list[str] = []

    def hear(done: int, total: int, what: str) -> None:
        heard.append(what)
        stop_search()

    model, x = layers()
    plan = autopar.plan(model, NODE, x, progress=hear)
    assert heard and STOPPED in plan.notes


def test_a_watched_search_ends_at_its_deadline_or_when_it_is_stopped() -> None:
    check_time()
    for watch in (SearchWatch(after(-1.0)), SearchWatch(is_stopped=True)):
        with watched(watch):
            with watched(None):
                check_time()  # what makes a plan of the answer goes on
            with pytest.raises(OutOfTimeError):
                check_time()
    with watched(SearchWatch(after(60.0))):
        check_time()
        assert left(None) > 1e9 and stop_search() and left(None) == 0.0 and not stop_search()


def test_what_a_search_does_is_told_again_while_it_goes_on() -> None:
    heard: list[str] = []
    watch = SearchWatch(tell=heard.append)
    with watched(watch):
        say("tracing")
        check_time()
        assert heard == ["tracing"]
        watch.told -= 2.0
        note_step(3.0)
        note_step(4.0)
        check_time()
    assert heard == ["tracing", "tracing; best so far 3 s a step"]


class Checkpointed(torch.nn.Module):
    """Layers that the model itself computes again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.sum()


@pytest.mark.parametrize("options", [{"force": "batch"}, {"memory": "1GB"}, {"time_limit": 1e-3}])
def test_first_plans_compute_again_what_the_model_says(options: dict[str, Any]) -> None:
    plan = autopar.plan(Checkpointed(), ClusterSpec.local(2), torch.zeros(64, 64), measure=False, **options)
    assert len(plan.program.recompute) == 3


def test_a_first_plan_proves_nothing_of_plans_of_other_kinds() -> None:
    step = first_step(problem(None), Parallelism.FILTER)
    assert step.bound == -math.inf and step.solution.status != "optimal"
