"""Estimates by which stages and micro-batches are ordered, beside what planning comes to."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.core.schedule import ScheduleKind
from autopar.cost.program.step import StepCost
from autopar.planning.estimates import OTHERWISE, MeshEstimate, bottleneck, choice_of
from autopar.planning.screening import Screen
from autopar.planning.search import decide
from autopar.trace.export import trace
from autopar.trace.forms.simplify import only_loss
from tests.planning.test_pipeline_search import BATCH, CLUSTER, OPEN, graph_of

EVEN = MeshEstimate(
    ranks=2,
    mesh=Mesh((4,)),
    count=4,
    samples=8,
    cost=StepCost(forward=1.0, backward=2.0, sync=0.0, update=0.0),
    work=3.0,
    slowest=1.5,
    weights=1.0,
    hiding=0.5,
    fixed=0.0,
    shards={4: 1.0},
    free=True,
    hop_bytes=0,
    hop=CLUSTER.intra,
    state_bytes=100,
    saved_bytes=40,
    recompute_seconds=1.0,
    lean_bytes=0,
)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_no_cut_has_a_faster_slowest_part(parts: int) -> None:
    draw = random.Random(parts)
    for _ in range(20):
        seconds = [draw.random() for _ in range(9)]
        cuts = combinations(range(1, len(seconds)), parts - 1)
        least = min(
            max(sum(seconds[a:b]) for a, b in zip((0, *cut), (*cut, len(seconds)), strict=True))
            for cut in cuts
        )
        assert bottleneck(seconds, parts) == pytest.approx(least)


def test_what_hides_comes_before_what_is_computed_again_and_of_one_stage_alone() -> None:
    one = replace(EVEN, ranks=1, slowest=3.0, hidden_bytes=10)
    for cap, seconds, nbytes in ((140, 12.0, 140), (135, 12.0, 135), (130, 12.0, 130), (115, 14.0, 115)):
        found = choice_of([one], 4, (), cap)  # 140 bytes; 4 seconds take 30 of them less
        assert (found.seconds, found.nbytes) == (pytest.approx(seconds), pytest.approx(nbytes))
    staged = replace(EVEN, hidden_bytes=10)
    kinds = (ScheduleKind.GPIPE,)
    assert choice_of([staged], 4, kinds, 1) == choice_of([EVEN], 4, kinds, 1)


def test_two_assignments_share_the_work_where_one_alone_does_not_fit() -> None:
    """A step of 12 seconds takes 140 bytes, one of 16 with its state in shards 90."""
    one = replace(EVEN, ranks=1, slowest=3.0, recompute_seconds=9.0)
    leaner = replace(one, cost=StepCost(1.0, 3.0, 0.0, 0.0), slowest=4.0, state_bytes=50)
    assert choice_of([one, leaner], 4, (), 115).seconds == pytest.approx(14.0)
    assert choice_of([one], 4, (), 115).seconds > 14.0
    assert choice_of([one, leaner], 4, (), 90).seconds == pytest.approx(16.0)


def test_sums_of_gradients_hide_behind_the_last_backward_pass_of_larger_micro_batches_sooner() -> None:
    """Of 2 seconds of sums 0.5 hide behind one of 4 micro-batches, 1 behind one of 2, and all behind one."""
    cost = StepCost(forward=1.0, backward=2.0, sync=2.0, update=0.0, hidden=0.5, summed=2.0)
    one = replace(EVEN, ranks=1, slowest=3.0, cost=cost)
    assert [one.seconds(None, count) for count in (4, 2, 1)] == pytest.approx([13.5, 13.0, 12.0])


@pytest.mark.slow
def test_an_estimate_is_near_to_what_planning_comes_to() -> None:
    screen = Screen(graph_of, [1, 2, 4, 8, 16], BATCH, CLUSTER, OPEN, None)
    choices = screen.choices(2)
    assert choices
    for choice in choices:
        asked = replace(OPEN, pipeline_ranks=2, micro_batches=choice.micro_batches, mesh=choice.mesh)
        found = decide(graph_of(choice.micro_batches), CLUSTER, asked).step
        assert choice.seconds == pytest.approx(found.seconds, rel=0.25)


def test_gradients_as_large_as_an_embedding_do_not_shrink_with_the_samples() -> None:
    """A dense gradient of 1 GiB is written for every micro-batch, however few samples it has."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(1 << 22, 64)
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self.layer(self.rows(x)).sum()
            return total

    @lru_cache
    def graph_of(micro_batches: int) -> Graph:
        with torch.device("meta"):
            model, x = Looked(), torch.zeros(4096 // micro_batches, dtype=torch.long)
        return only_loss(trace(model, (x,), {}).graph)

    device = ClusterSpec(devices_per_node=1, device="a100")
    screen = Screen(graph_of, [1, 4, 16], 4096, device, OPEN, None)
    choices = screen.choices(1)
    assert [each.micro_batches for each in choices] == [1, 4]
    for choice in choices:
        asked = replace(OPEN, micro_batches=choice.micro_batches, mesh=choice.mesh)
        found = decide(graph_of(choice.micro_batches), device, asked).step
        assert choice.seconds == pytest.approx(found.seconds, rel=0.25)


def test_uneven_stages_and_uneven_samples_count() -> None:
    kind = ScheduleKind.ONE_F_ONE_B
    assert EVEN.seconds(kind, 4) == pytest.approx(4 * 1.5 + 1.5)
    assert replace(EVEN, slowest=2.0).seconds(kind, 4) == pytest.approx(4 * 2.0 + 1.5)
    # 16 micro-batches have two samples each for four devices
    even = replace(EVEN, shards={1: 1.0})
    assert EVEN.scaled(3.0, 16) == pytest.approx(OTHERWISE * even.scaled(3.0, 16))
    assert replace(EVEN, free=False).scaled(3.0, 16) == pytest.approx(2 * even.scaled(3.0, 16))


def test_a_schedule_that_keeps_too_much_is_not_counted_on() -> None:
    kinds, fixed = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.DUALPIPEV), replace(EVEN, lean_bytes=40)
    roomy, tight = choice_of([fixed], 4, kinds, 1e9), choice_of([fixed], 4, kinds, 95)
    assert roomy.seconds == pytest.approx(EVEN.seconds(ScheduleKind.DUALPIPEV, 4))
    assert tight.seconds == pytest.approx(EVEN.seconds(ScheduleKind.ONE_F_ONE_B, 4))


@pytest.mark.parametrize(("kind", "share"), [(ScheduleKind.ONE_F_ONE_B, 0.5), (ScheduleKind.DUALPIPEV, 0.6)])
def test_as_much_is_computed_again_as_memory_asks_for(kind: ScheduleKind, share: float) -> None:
    again = choice_of([EVEN], 4, (kind,), 70)
    assert again.nbytes == pytest.approx(70)
    assert again.seconds == pytest.approx(EVEN.seconds(kind, 4) + 4 * share * 1.0 / 2)


def test_a_mesh_that_was_left_out_of_a_sample_is_not_rated_by_another() -> None:
    """Of two micro-batches one mesh was looked at, of the whole batch another one beside it."""
    screen = Screen(graph_of, [1, 2, 4], BATCH, CLUSTER, OPEN, None)
    screen.fewest = 2
    whole = replace(EVEN, ranks=1, count=1)
    parts = replace(whole, count=2)
    other = replace(whole, mesh=Mesh((2, 2)))
    rated = {(choice.mesh, choice.micro_batches) for choice in screen.rated([parts, whole, other])}
    assert {count for mesh, count in rated if mesh == other.mesh} == {1}
    assert {1, 2, 4} <= {count for mesh, count in rated if mesh == whole.mesh}
