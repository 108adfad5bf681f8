"""Published runs: what is read, where the stack cuts, scores by hand, and predictions of a small model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import Collective
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.schedules.in_flight import scheduled
from autopar.schedules.simulate import simulate
from tests.benchmarks.published import baselines, prediction
from tests.benchmarks.published.__main__ import app
from tests.benchmarks.published.fitting import fit
from tests.benchmarks.published.pieces import Piece, Pieces
from tests.benchmarks.published.prediction import Predictor
from tests.benchmarks.published.runs import Run, Shape, Split, read
from tests.benchmarks.published.score import memory, regret, score, spearman
from tests.benchmarks.published.stack import (
    BOUNDS,
    RankPieces,
    Stack,
    Way,
    buckets,
    is_slow,
    pass_seconds,
    stages,
    sum_seconds,
)

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


@pytest.mark.parametrize("text", ["", "dp,tp\n1,2\n", HEADER])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(InputError, match="the columns of"):
        read(tmp_path / "runs.csv")
    assert CliRunner().invoke(app, [str(tmp_path / "runs.csv")]).exit_code == 2


@pytest.mark.parametrize(
    "before, after, column",
    [
        ("64,4,4", "64,four,4", "num_layers"),
        ("2,1,4,64", "2,0,4,64", "pp"),
        (",1,True\n", ",3,True\n", "zero_stage"),
        (",1,True\n", ",1,maybe\n", "after_pp_fix"),
        ("128.0,400.5", "0,400.5", "tok/s/gpu"),
        ("128.0,400.5", "nan,400.5", "tok/s/gpu"),
        ("2,1,4,64", "9999999999,1,4,64", "dp"),
        ("64,4,4,2.0", "64,4,4,3.0", "num_kv_heads"),
    ],
)
def test_a_cell_that_cannot_be_is_named_with_its_line(
    before: str, after: str, column: str, tmp_path: Path
) -> None:
    assert WENT.count(before) == 1
    (tmp_path / "runs.csv").write_text(HEADER + FULL + WENT.replace(before, after))
    with pytest.raises(InputError) as caught:
        read(tmp_path / "runs.csv")
    assert f"line 3, column {column}" in str(caught.value)


OTHER_COLUMNS = HEADER.strip() + ",status,oom_error,gbs,dtype,num_experts\n"


@pytest.mark.parametrize(
    ("line", "column"),
    [
        (WENT.replace(",128.0,", ",,").strip() + ",Timeout,False,16,,\n", "status"),
        (WENT.strip() + ",Success,False,15,,\n", "gbs"),
        (WENT.strip() + ",Success,False,16,torch.float32,\n", "dtype"),
        (WENT.strip() + ",Success,False,16,torch.bfloat16,8\n", "num_experts"),
        (WENT.replace(",2,1,4,64", ",2,1,3,64"), "tp"),
        (WENT.replace(",128.0,", ",nan,"), "tok/s/gpu"),
    ],
)
def test_what_would_be_predicted_wrongly_is_refused_by_line_and_column(
    line: str, column: str, tmp_path: Path
) -> None:
    (tmp_path / "runs.csv").write_text(OTHER_COLUMNS + line)
    with pytest.raises(InputError, match=f"line 2, column {column}: "):
        read(tmp_path / "runs.csv")


@pytest.mark.parametrize(
    "line",
    [
        FULL.strip() + ",OOM,True,16,,\n",
        FULL.replace(",1.0,,,2", ",1.0,OOM,,2").strip() + ",,,,nan,\n",
        FULL.replace(",1.0,,,2", ",1.0,nan,,2").strip() + ",Fail,TRUE,,None,1\n",
    ],
)
def test_memory_that_ran_out_is_marked_in_several_ways(line: str, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("\ufeff" + OTHER_COLUMNS + WENT + line)
    went, full = read(tmp_path / "runs.csv")
    assert went.seconds and full.seconds is None


def test_models_that_differ_in_heads_of_keys_alone_are_two(tmp_path: Path) -> None:
    other = WENT.replace(",4,2.0,512", ",4,4.0,512")
    (tmp_path / "runs.csv").write_text(HEADER + WENT + other)
    assert [run.shape.kv_heads for run in read(tmp_path / "runs.csv")] == [2, 4]
    (tmp_path / "runs.csv").write_text(HEADER + WENT + other + FULL)
    with pytest.raises(InputError, match="line 4, column num_kv_heads"):
        read(tmp_path / "runs.csv")


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("tp," + HEADER + "8," + WENT)
    with pytest.raises(InputError, match="several columns tp"):
        read(tmp_path / "runs.csv")


def test_few_runs_have_errors_but_no_ranks() -> None:
    found = score([run_of(Split(1, 1, 1, 1, 1, 0))], [2.0], [True])
    assert (found.groups, found.rank, found.regret, found.median_error) == (0, None, None, 1.0)
    with pytest.raises(InputError, match="none with a throughput"):
        baselines.fitted([run_of(Split(1, 1, 1, 1, 1, 0), None)])


def test_weights_are_counted() -> None:
    assert SMALL.layer_weights == 4 * 64 * 64 + 3 * 64 * 128
    assert SMALL.weights == 4 * SMALL.layer_weights + 2 * 512 * 64
    assert replace(SMALL, tied=True).weights == SMALL.weights - 512 * 64


def test_a_stage_ends_with_the_block_that_brings_it_above_its_share() -> None:
    """Four blocks of 1 and a head of 0.8: 4.8 in all, 2.4 each; the head is the last stage's."""
    assert SMALL.table_weights / SMALL.layer_weights == pytest.approx(0.8)
    assert stages(SMALL, 2) == (RankPieces((1, 3, 0, 0)), RankPieces((0, 1, 1, 1)))
    assert stages(SMALL, 1) == (RankPieces((1, 4, 1, 1)),)
    assert sum(stage.counts[1] for stage in stages(SMALL, 5)) == 4
    assert stages(SMALL, 6)[-2:] == (RankPieces((0, 0, 0, 0)), RankPieces((0, 0, 1, 1)))


def piece(**fields: object) -> Piece:
    empty = dict.fromkeys(Piece.__dataclass_fields__, 0) | {"exchanges": (), "exchanges_back": ()}
    return Piece(**(empty | fields))  # type: ignore[arg-type]


GATHER = (Collective.ALL_GATHER, 8_000_000_000)  # 7 s over eight devices of 1e9 bytes/s
NEAR, FAR = Link(0.0, 1e9), Link(0.5, 1e12)
WAY = Way(near=NEAR, ring=FAR, sums=NEAR)


def test_a_pass_takes_the_longer_of_products_and_exchanges_or_what_the_host_takes() -> None:
    stack = Stack(pace=2.0, host=3.0, beside=0.75)
    block = piece(
        products=5.0, products_back=1.0, moves=4.0, exchanges=(GATHER,), exchanges_back=(GATHER,) * 2
    )
    stage, pieces = RankPieces((0, 2, 0, 0)), (piece(), block, piece(), piece())

    def seconds(tp: int, *, backward: bool, way: Way = WAY) -> float:
        return pass_seconds(stage, pieces, Split(1, tp, 1, 1, 1, 0), stack, way, backward=backward)

    assert seconds(1, backward=False) == 2 * (2 * 5 + 4)
    assert seconds(8, backward=False) == pytest.approx(2 * (2 * 5 + 4) + 0.25 * 2 * 7, rel=1e-3)
    assert seconds(8, backward=True) == pytest.approx(2 * 2 * 7 + 0.25 * 2 * 2, rel=1e-3)
    idle = (piece(), piece(exchanges=(GATHER,)), piece(), piece())
    way = replace(WAY, near=Link(0.0, 1e15), checked=0.25)
    split = Split(1, 8, 1, 1, 1, 0)
    assert pass_seconds(stage, idle, split, stack, way, backward=False) == pytest.approx(
        2 * 3 / 3 + 2 * 7 * 0.25
    )


def test_sums_hide_behind_the_last_backward_without_zero_alone() -> None:
    stack = Stack(overlap=0.5, thin=0.0)

    def exposed(zero: int, behind: float, *, dp: int = 4, way: Way = WAY) -> float:
        return sum_seconds(1e9, 6, Split(dp, 1, 1, 1, 1, zero), stack, way, behind=behind)

    whole = 2 * 3 / 4 * 4
    assert exposed(0, 0.0) == pytest.approx(whole, rel=1e-3)
    assert exposed(0, 4.0) == pytest.approx(exposed(0, 0.0) - 2)
    assert exposed(0, 99.0) == pytest.approx(
        whole / 6, rel=1e-3
    )  # the last bucket's has nothing to hide behind
    assert exposed(0, 0.0, dp=1) == 0.0
    assert exposed(1, 99.0) == exposed(1, 0.0) == pytest.approx(3 / 4 * 6, rel=1e-3)
    checked = replace(WAY, checked_sum=1.0)
    assert exposed(0, 0.0, way=checked) == exposed(0, 0.0)  # within a node there is nothing to check
    assert exposed(0, 0.0, dp=16, way=checked) == pytest.approx(exposed(0, 0.0, dp=16) + 6 * 15)
    assert exposed(1, 0.0, dp=16, way=checked) == pytest.approx(exposed(1, 0.0, dp=16) + 2 * 15)


def test_buckets_hold_tensors_until_they_are_full() -> None:
    shape = Shape(4096, 2, 32, 32, 14336, 1024, 32, tied=False)
    stage = RankPieces((1, 2, 1, 1))
    # The head, 8 MiB, with down, then gate and up, o, and q k v of each block; the embedding remains.
    assert buckets(stage, shape, 1) == 4 + 4 + 1
    assert buckets(stage, SMALL, 1) == 1


def test_conditions_are_told_by_what_a_job_measured_or_by_what_was_run_when() -> None:
    run = replace(run_of(Split(4, 8, 1, 1, 1, 0)), nodes=4, all_gather=215e9, mended=False)
    assert not is_slow(run, by_links=False) and not is_slow(run, by_links=True)
    assert is_slow(replace(run, all_gather=97e9), by_links=True)
    assert is_slow(replace(run, mended=True), by_links=False)
    assert not is_slow(replace(run, nodes=1, mended=True), by_links=False)


def test_scores_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 2, 3], [5, 5, 5]) == 0
    assert regret([(1.0, 3.0), (2.0, 1.0), (4.0, 2.0)]) == pytest.approx(0.5)
    runs = [run_of(Split(2, 1, 1, 1, 1, 0), seconds) for seconds in (1.0, 2.0, 4.0)]
    found = score(runs, [1.1, 2.0, 2.0], [True] * 3)
    assert (found.groups, found.runs, found.regret) == (1, 3, 0.0)
    assert found.rank == pytest.approx(np.sqrt(0.75)) and found.median_error == pytest.approx(0.1)
    found = score(runs, [1.0, 3.0, 4.0], [False, True, True])  # the fastest is said not to fit
    assert found.regret == 0.5 and found.rank == pytest.approx(-0.5)
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


@pytest.mark.long
def test_predictions_follow_the_split() -> None:
    """Of one model whose micro-batches are large enough for its devices."""
    ways = [(1, 1, 1, 4, 0), (1, 1, 1, 8, 0), (1, 1, 2, 4, 0), (4, 1, 1, 1, 0), (4, 1, 1, 1, 1)]
    splits = [*ways, (1, 4, 1, 4, 0)]
    predictor = Predictor(constants=Stack(fixed=0.0, overlap=1.0))
    runs = [run_of(Split(dp, tp, pp, 2, count, zero)) for dp, tp, pp, count, zero in splits]
    whole, longer, staged, copies, shards, tensor = predictor.predict(runs)
    assert 1.9 * whole.seconds < longer.seconds <= 2 * whole.seconds and longer.nbytes == whole.nbytes
    assert staged.nbytes < whole.nbytes and tensor.nbytes < whole.nbytes and shards.nbytes < copies.nbytes


def test_runs_are_simulated_together_as_they_are_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "price", by_hand)
    predictor = Predictor()
    runs = [run_of(Split(1, 1, 2, samples, 4, 0)) for samples in (1, 2)]
    both = [each.seconds for each in predictor.predict(runs)]
    schedule = scheduled(ScheduleKind.ONE_F_ONE_B, 2, 1, 4)
    assert both == pytest.approx(
        [simulate(schedule, predictor.costs(run, predictor.constants)).seconds for run in runs]
    )


def test_kept_bytes_and_weights_are_those_of_the_whole_model() -> None:
    """A model of two blocks, priced whole, has what its pieces come to."""
    (stage,) = stages(replace(SMALL, layers=2), 1)
    predictor = Predictor()
    run = run_of(Split(1, 1, 1, 2, 1, 0))
    pieces = predictor.pieces(SMALL, run.split.samples, 1)
    assert stage.total(pieces, "weights") == pytest.approx(replace(SMALL, layers=2).weights, rel=0.01)


def by_hand(shape: Shape, samples: int, cluster: ClusterSpec) -> Pieces:
    """Pieces whose products take a millisecond a sample and layer."""
    block = piece(products=1e-3 * samples, products_back=2e-3 * samples, weights=1e6, leaving=1e3)
    return piece(), block, piece(products=1e-3 * samples), piece()


def test_a_fit_finds_the_constants_that_made_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "price", by_hand)
    true = Stack(pace=0.7, host=4e-3, fixed=0.03)
    splits = [Split(1, 1, 1, samples, count, 0) for samples in (1, 2, 64) for count in (1, 4, 16)]
    predictor = Predictor()
    runs = [run_of(split) for split in splits]
    (seconds,) = predictor.seconds(runs, [true])
    made = [replace(run, seconds=each) for run, each in zip(runs, seconds.tolist(), strict=True)]
    found = fit(predictor, made)
    assert (found.host, found.fixed) == pytest.approx((true.host, true.fixed), rel=0.02)
    assert all(low <= getattr(found, name) <= high for name, (low, high) in BOUNDS.items())
    assert fit(predictor, made) == found


def test_every_constant_of_the_stack_has_bounds() -> None:
    assert list(BOUNDS) == list(Stack.__dataclass_fields__)
    assert all(low < getattr(Stack(), name) < high for name, (low, high) in BOUNDS.items())


def test_cross_validation_predicts_a_model_by_what_was_fitted_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that take ten times as long as those of the other model are unknown to what predicts them."""
    monkeypatch.setattr(prediction, "price", by_hand)
    small = "1.0,32,{mbs},4.0,{speed},,2,1,1,64,{layers},4,4,512,False,128,1,True\n"
    lines = [
        small.format(mbs=mbs, speed=speed * mbs, layers=layers)
        for layers, speed in ((4, 1000.0), (2, 100.0))
        for mbs in (1, 2, 4)
    ]
    (tmp_path / "runs.csv").write_text(HEADER + "".join(lines))
    result = CliRunner().invoke(app, [str(tmp_path / "runs.csv"), "--cross-validate", "--json"])
    rows = {row["whose"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == ["autopar", "alpha-beta", "11 fitted", "11, others"]
    assert rows["autopar"]["median_error"] > 0.5 and rows["11, others"]["median_error"] > 0.5
    (tmp_path / "runs.csv").write_text(HEADER + "".join(lines[:3]))
    result = CliRunner().invoke(app, [str(tmp_path / "runs.csv"), "--cross-validate"])
    assert result.exit_code == 2 and "at least two models" in result.stderr
