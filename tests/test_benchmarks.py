"""The benchmarks' statistics, by hand, and one short run of the harness."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from autopar.core.mesh import Mesh
from autopar.errors import CheckError
from autopar.planning.asked.request import Request
from autopar.planning.planner import Planner
from autopar.planning.search import FoundPlan as Planned
from tests.benchmarks import low_precision
from tests.benchmarks.__main__ import measure
from tests.benchmarks.cases import BENCHMARKS
from tests.benchmarks.contest import Contestant, Timed, shared, too_slow
from tests.benchmarks.hierarchical import Way, decide_all
from tests.benchmarks.host_contest import HostFigures, check_losses
from tests.benchmarks.hosts import evaluate, table
from tests.benchmarks.joint import gpus
from tests.benchmarks.joint_nets import vgg
from tests.benchmarks.statistics import order, ratio


@pytest.mark.parametrize(("count", "rank"), [(5, 1), (6, 1), (20, 6), (100, 40)])
def test_order_statistics_that_enclose_the_median(count: int, rank: int) -> None:
    assert order(count) == rank
    outside = 2 * sum(math.comb(count, k) for k in range(rank)) / 2**count
    assert outside <= 0.05 or rank == 1


def test_ratios_are_paired() -> None:
    found = ratio([2.0 * drift for drift in range(1, 21)], [1.0 * drift for drift in range(1, 21)])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)


def test_the_same_program_is_timed_once() -> None:
    programs = {"auto": "p", "eager": None, "batch": "q", "domain": "p", "ddp": None}
    contestants = {name: Contestant(lambda: None, program=program) for name, program in programs.items()}
    assert shared(contestants) == {"domain": "auto"}


def test_the_fastest_of_the_others_is_timed_however_slow() -> None:
    warm = {"auto": 1.0, "batch": 2.0, "domain": 2.9, "filter": 3.1}
    assert too_slow(warm, keep=("auto",)) == {"filter": 3.1}
    assert too_slow(warm, keep=tuple(warm)) == {}


def test_hosts_compare_the_own_plan_with_the_faster_data_parallel() -> None:
    seconds = {"auto": [1.0, 1.0, 2.0], "ddp": [9.0] * 3, "ddp, small buckets": [3.0, 2.0, 8.0]}
    names = (*seconds, "domain")
    timed = Timed(seconds, seconds, dict.fromkeys(names, 0.5), left_out={"domain": 20.0})
    found = HostFigures(
        timed, dict.fromkeys(names, "-"), dict.fromkeys(names, 0.0), refused={"channel": "none"}
    )
    outcome = evaluate("slow", found)
    assert (outcome.theirs, outcome.faster.median) == ("ddp, small buckets", 3.0)
    assert [row.name for row in outcome.rows] == ["auto", "ddp, small buckets", "ddp", "domain"]
    assert [row.warm_up for row in outcome.rows] == [False, False, False, True]
    assert table(outcome).row_count == 5


@pytest.mark.parametrize(
    ("losses", "serial"),
    [([4.0, 3.1], [4.0, 3.0]), ([4.0, float("nan")], [4.0, 3.0]), ([4.0, 4.0], [4.0, 4.0])],
    ids=["wrong", "not a number", "serial ones that don't fall"],
)
def test_a_contender_without_the_serial_losses_is_refused_by_name(
    losses: list[float], serial: list[float]
) -> None:
    assert check_losses("ours", [4.0, 3.00001], [4.0, 3.0]) < 1e-5
    with pytest.raises(CheckError, match="losses of ours"):
        check_losses("ours", losses, serial)


def deciding(memory: int | None = None) -> dict[Way, Planned]:
    """Of a net whose last layers gain little from four GPUs, in two stages."""
    with torch.device("meta"):
        model = vgg([[64] * 2, [64] * 2, [64] * 5], side=112, hidden=16)
        inputs = torch.zeros(8, 3, 112, 112), torch.zeros(8, dtype=torch.long)
    request = Request(mesh=Mesh((4,)), memory=memory, pipeline_ranks=2, micro_batches=2, alternatives=False)
    graph = Planner(gpus(2, 4), request, F.cross_entropy).trace_step(model, inputs, {}).graph
    found = decide_all(graph, gpus(2, 4), request)
    return {way: each for way, each in found.items() if isinstance(each, Planned)}


def test_what_is_decided_together_is_faster_than_the_same_placement_under_a_cut_made_before() -> None:
    joint, cut_first, by_layers = (each.plan for each in deciding().values())
    assert joint.program == cut_first.program == by_layers.program
    assert by_layers.pipeline.starts == (0, len(by_layers.layers) // 2)
    assert cut_first.pipeline.starts < joint.pipeline.starts  # the first layers gain more from the split
    assert 1.04 * joint.step_seconds < cut_first.step_seconds
    assert joint.step_seconds <= by_layers.step_seconds


@pytest.mark.long
def test_a_cut_made_before_may_need_what_the_joint_one_keeps() -> None:
    cap = deciding()[Way.JOINT].plan.peak_bytes + 1
    found = deciding(cap)
    assert set(found) == set(Way) and all(each.plan.peak_bytes <= cap for each in found.values())
    assert not found[Way.JOINT].plan.program.recompute and found[Way.CUT_FIRST].plan.program.recompute


@pytest.mark.long
def test_a_benchmark_reports_both_sides(tmp_path: object) -> None:
    row = measure(
        next(item for item in BENCHMARKS if item.name == "one-device digits"), "tuned", 5, str(tmp_path)
    )
    assert row.rounds >= 5 and set(row.seconds) == {"auto", "eager"}
    assert row.predicted["auto"] and row.ratio.low <= row.ratio.median <= row.ratio.high


@pytest.mark.long
def test_plans_in_low_precision_differ_as_serial_reruns_do() -> None:
    for row in low_precision.rows("characters", steps=2):
        assert row.low.passed and len(row.cells) == 5
