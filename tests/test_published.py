"""Published runs: what is read, where the stack cuts, scores by hand, and predictions of a small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from autopar.errors import InputError
from tests.benchmarks.published import baselines
from tests.benchmarks.published.__main__ import app
from tests.benchmarks.published.prediction import Predictor
from tests.benchmarks.published.runs import Run, Shape, Split, read
from tests.benchmarks.published.score import memory, regret, score, spearman
from tests.benchmarks.published.stack import Stage, stages

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
    predictor = Predictor()
    whole = predictor.predict(run_of(Split(1, 1, 1, 2, 4, 0)))
    longer = predictor.predict(run_of(Split(1, 1, 1, 2, 8, 0)))
    assert 1.5 * whole.seconds < longer.seconds < 2 * whole.seconds and longer.nbytes == whole.nbytes
    split = predictor.predict(run_of(Split(1, 1, 2, 2, 4, 0)))
    assert split.nbytes < whole.nbytes
    shards = [predictor.predict(run_of(Split(4, 1, 1, 2, 1, zero))) for zero in (0, 1)]
    assert shards[1].nbytes < shards[0].nbytes
    tensor = predictor.predict(run_of(Split(1, 4, 1, 2, 4, 0)))
    assert tensor.nbytes < whole.nbytes


def test_kept_bytes_and_weights_are_those_of_the_whole_model() -> None:
    """A model of two blocks, priced whole, has what its pieces come to."""
    (stage,) = stages(replace(SMALL, layers=2), 1)
    predictor = Predictor()
    run = run_of(Split(1, 1, 1, 2, 1, 0))
    pieces = predictor.pieces(SMALL, 2, predictor.cluster(run))
    assert stage.total(pieces, "weights") == pytest.approx(replace(SMALL, layers=2).weights, rel=0.01)
