"""Published runs: what is read, where the stack cuts, scores by hand, and predictions of a small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from autopar.cluster import ClusterSpec, Link
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.schedules.in_flight import scheduled
from autopar.schedules.simulate import simulate
from tests.benchmarks.published import baselines
from tests.benchmarks.published.__main__ import app
from tests.benchmarks.published.pieces import Piece
from tests.benchmarks.published.prediction import Predictor
from tests.benchmarks.published.runs import Run, Shape, Split, read
from tests.benchmarks.published.score import memory, regret, score, spearman
from tests.benchmarks.published.stack import Stack, Stage, is_slow, pass_seconds, stages, sum_seconds

SMALL = Shape(64, 4, 4, 4, 128, 512, 32, tied=False)
HEADER = (
    "nodes,seq_len,mbs,batch_accum,tok/s/gpu,AllReduce (GB/s),dp,pp,tp,hidden_size,num_layers,num_heads,"
    "num_kv_heads,vocab_size,tie_word_embeddings,interm_dim,zero_stage,after_pp_fix\n"
)
WENT = "1.0,32,2,4.0,128.0,400.5,2,1,4,64,4,4,2.0,512,True,128,1,True\n"
FULL = "1.0,32,8,1.0,,,2,1,4,64,4,4,,512,,128,0,False\n"


def run_of(split: Split, seconds: float | None = 1.0, shape: Shape = SMALL) -> Run:
    return Run(shape, split, 1, seconds, mended=True, all_reduce=None, all_gather=None)


def test_a_row_says_how_long_a_step_took_and_a_row_without_memory_is_of_the_same_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "runs.csv").write_text(HEADER + WENT + FULL)
    went, full = read(tmp_path / "runs.csv")
    assert went.split == Split(dp=2, tp=4, pp=1, samples=2, micro_batches=4, zero=1)
    assert went.seconds == pytest.approx(2 * 2 * 4 * 32 / (128 * 8)) and went.all_reduce == 400.5e9
    assert full.seconds is None and full.shape == went.shape and went.shape.tied and went.shape.kv_heads == 2
    assert (went.mended, full.mended) == (True, False)


@pytest.mark.parametrize("text", ["", "dp,tp\n1,2\n", HEADER + WENT.replace("64,4,4", "64,four,4")])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(InputError, match="the columns of"):
        read(tmp_path / "runs.csv")
    assert CliRunner().invoke(app, [str(tmp_path / "runs.csv")]).exit_code == 2


def test_weights_are_counted() -> None:
    assert SMALL.layer_weights == 4 * 64 * 64 + 3 * 64 * 128
    assert SMALL.weights == 4 * SMALL.layer_weights + 2 * 512 * 64
    assert replace(SMALL, tied=True).weights == SMALL.weights - 512 * 64


def test_a_stage_ends_with_the_layer_that_brings_it_above_its_share() -> None:
    """Four layers of 1 and a head of 0.8: 4.8 in all, 2.4 each."""
    assert SMALL.table_weights / SMALL.layer_weights == pytest.approx(0.8)
    assert stages(SMALL, 2) == (Stage((1, 3, 0, 0)), Stage((0, 1, 1, 1)))
    assert stages(SMALL, 1) == (Stage((1, 4, 1, 1)),)
    assert sum(stage.counts[1] for stage in stages(SMALL, 5)) == 4


def piece(**fields: float) -> Piece:
    empty = dict.fromkeys(Piece.__dataclass_fields__, 0)
    return Piece(**(empty | fields))  # type: ignore[arg-type]


def test_a_pass_takes_what_the_device_or_the_host_takes() -> None:
    stack = Stack(host=3.0, host_forward=1 / 3, beside=0.75, far_hop=0.5, slow_exchange=0.25)
    block = piece(
        forward=5.0, backward=9.0, exchanging=4.0, exchanges=2, exchanging_back=8.0, exchanges_back=3
    )
    stage, pieces = Stage((0, 2, 0, 0)), (piece(), block, piece(), piece())

    def seconds(tp: int, *, backward: bool, slow: bool = False) -> float:
        return pass_seconds(stage, pieces, Split(1, tp, 1, 1, 1, 0), stack, backward=backward, slow=slow)

    assert seconds(4, backward=False) == 2 * (5 + 0.25 * 4)
    assert seconds(4, backward=True) == 2 * (9 + 0.25 * 8)
    assert seconds(32, backward=False) == 2 * (5 + 0.25 * 4) + 2 * 2 * 3 * 0.5  # four nodes
    assert seconds(8, backward=False, slow=True) == 2 * (5 + 0.25 * 4)
    assert seconds(8, backward=True, slow=True) == 2 * (9 + 0.25 * 8)
    idle = (piece(), piece(exchanges=2), piece(), piece())
    split = Split(1, 8, 1, 1, 1, 0)
    assert pass_seconds(stage, idle, split, stack, backward=False, slow=False) == pytest.approx(2 * 3 / 3)
    slow = pass_seconds(stage, idle, split, stack, backward=False, slow=True)
    assert slow == pytest.approx(2 * 3 / 3 + 2 * 2 * 8 * 0.25)


def test_sums_hide_behind_the_last_backward_without_zero_alone() -> None:
    cluster = ClusterSpec(devices_per_node=4, device="h100", intra=Link(0.0, 1e9))
    stage, stack = Stage((0, 1, 0, 0)), Stack(overlap=0.5)

    def exposed(zero: int, behind: float, *, dp: int = 4) -> float:
        split = Split(dp, 1, 1, 1, 1, zero)
        return sum_seconds(stage, 1e9, split, cluster, stack, slow=False, behind=behind)

    assert exposed(0, 0.0) == pytest.approx(2 * 3 / 4 * 4, rel=1e-3)
    assert exposed(0, 4.0) == pytest.approx(exposed(0, 0.0) - 2)
    assert exposed(0, 99.0) == 0.0 and exposed(0, 0.0, dp=1) == 0.0
    assert exposed(1, 99.0) == exposed(1, 0.0) == pytest.approx(3 / 4 * 6, rel=1e-3)


def test_conditions_are_told_by_what_a_job_measured_or_by_what_was_run_when() -> None:
    run = replace(run_of(Split(4, 8, 1, 1, 1, 0)), nodes=4, all_reduce=180e9, mended=False)
    assert not is_slow(run, by_links=False) and not is_slow(run, by_links=True)
    assert is_slow(replace(run, all_reduce=90e9), by_links=True)
    assert is_slow(replace(run, mended=True), by_links=False)
    assert not is_slow(replace(run, nodes=1, mended=True), by_links=False)


def test_scores_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 2, 3], [5, 5, 5]) == 0
    assert regret([(1.0, 3.0), (2.0, 1.0), (4.0, 2.0)]) == pytest.approx(0.5)
    runs = [run_of(Split(2, 1, 1, 1, 1, 0), seconds) for seconds in (1.0, 2.0, 4.0)]
    found = score(runs, [1.1, 2.0, 2.0])
    assert (found.groups, found.runs, found.regret) == (1, 3, 0.0)
    assert found.rank == pytest.approx(np.sqrt(0.75)) and found.median_error == pytest.approx(0.1)
    told = memory(
        [*runs[:2], run_of(runs[0].split, None), run_of(runs[0].split, None)], [True, False, True, False]
    )
    assert (told.right, told.missed) == (0.5, 0.25)


def test_the_fitted_baseline_finds_factors_and_leaves_out_those_below_zero() -> None:
    matrix = np.random.default_rng(0).random((40, 3)) + 0.1
    wanted = matrix @ np.array([2.0, 0.0, 0.5])
    found = baselines.not_negative(matrix / wanted[:, None])
    assert found == pytest.approx([2.0, 0.0, 0.5], abs=1e-6)
    assert (baselines.not_negative(np.array([[1.0, 5.0], [1.0, 9.0], [1.0, 2.0]])) >= 0).all()


def test_predictions_follow_the_split() -> None:
    """Of one model whose micro-batches are large enough for its devices."""
    ways = [(1, 1, 1, 4, 0), (1, 1, 1, 8, 0), (1, 1, 2, 4, 0), (4, 1, 1, 1, 0), (4, 1, 1, 1, 1)]
    splits = [*ways, (1, 4, 1, 4, 0)]
    predictor = Predictor(constants=Stack(fixed=0.0))
    runs = [run_of(Split(dp, tp, pp, 2, count, zero)) for dp, tp, pp, count, zero in splits]
    whole, longer, staged, copies, shards, tensor = predictor.predict(runs)
    assert 1.9 * whole.seconds < longer.seconds <= 2 * whole.seconds and longer.nbytes == whole.nbytes
    assert staged.nbytes < whole.nbytes and tensor.nbytes < whole.nbytes and shards.nbytes < copies.nbytes


def test_runs_are_simulated_together_as_they_are_one_by_one() -> None:
    predictor = Predictor()
    runs = [run_of(Split(1, 1, 2, samples, 4, 0)) for samples in (1, 2)]
    both = [each.seconds for each in predictor.predict(runs)]
    schedule = scheduled(ScheduleKind.ONE_F_ONE_B, 2, 1, 4)
    assert both == pytest.approx([simulate(schedule, predictor.costs(run)).seconds for run in runs])


def test_kept_bytes_and_weights_are_those_of_the_whole_model() -> None:
    """A model of two blocks, priced whole, has what its pieces come to."""
    (stage,) = stages(replace(SMALL, layers=2), 1)
    predictor = Predictor()
    run = run_of(Split(1, 1, 1, 2, 1, 0))
    pieces = predictor.pieces(SMALL, 2, predictor.cluster(run))
    assert stage.total(pieces, "weights") == pytest.approx(replace(SMALL, layers=2).weights, rel=0.01)
