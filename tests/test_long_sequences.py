"""Published splits of long sequences: what is read, what stands beside a row, and a row that is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.core.gathering import ShardState
from autopar.core.recompute import Recompute
from autopar.errors import InputError
from tests.benchmarks.published import long_sequences
from tests.benchmarks.published.long_sequences import (
    Degrees,
    LongResult,
    PlannedSplit,
    memory_of,
    order,
    read,
)

HEADER = (
    "model,device,sequence,gpus,global_batch_tokens,precision,tflops_per_gpu_best_without_cp,"
    "tflops_per_gpu_best_with_cp,split_with_cp\n"
)
ROW = "Llama-2-7B,H100,131072,128,4194304,fp8,400,500,TP4 DP8 CP4\n"
ALONE = (
    "model,device,gpus,sequence,local_batch,split,tokens_per_s_per_gpu,peak_gib,precision,recompute\n"
    "Llama-3.1-8B,H100-96GB,8,65536,1,FSDP4 CP2,2500,84,float8,full\n"
)


def rows(folder: Path, text: str) -> list[long_sequences.LongRow]:
    (folder / "rows.csv").write_text(text)
    return read(folder / "rows.csv")


def test_a_row_has_its_degrees_and_sequences(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, HEADER + ROW)
    assert row.split == Degrees(dp=8, cp=4, tp=4) and row.sequences == 32 and row.gain == 1.25
    assert row.cluster.nodes == 16 and row.cluster.devices_per_node == 8
    assert row.others == [
        Degrees(dp=32, tp=4),
        Degrees(dp=16, tp=8),
        Degrees(dp=8, tp=16),
        Degrees(dp=4, tp=32),
    ]
    (alone,) = rows(tmp_path, ALONE)
    assert alone.split == Degrees(dp=4, cp=2) and alone.sequences == 4 and alone.gain is None
    assert (alone.state, alone.recompute) == (ShardState.WEIGHTS, Recompute.ALL)


@pytest.mark.parametrize(
    "wrong", [ROW.replace("CP4", "CP2"), ROW.replace("2-7B", "4"), ROW.replace("TP4", "XP4")]
)
def test_rows_that_do_not_add_up_are_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(InputError, match="the published table"):
        rows(tmp_path, HEADER + wrong)


def test_gains_are_ranked_as_published(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, HEADER + ROW)
    pairs = [(1.0, 1.0), (2.0, 1.5), (3.0, 1.2)]
    found = [
        LongResult(
            replace(row, published=row.published * published),
            PlannedSplit("own", 1.0, 0),
            PlannedSplit("other", mine, 0),
        )
        for published, mine in pairs
    ]
    assert order(found) == pytest.approx(0.5)


@pytest.mark.slow
def test_a_rows_split_is_planned_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(long_sequences.SHAPES["Llama-2-7B"], hidden=256, layers=4, heads=4, kv_heads=4, inner=512)
    monkeypatch.setitem(long_sequences.SHAPES, "Llama-2-7B", replace(small, vocabulary=512))
    (row,) = rows(tmp_path, HEADER + "Llama-2-7B,H100,4096,8,16384,fp8,1,1,TP2 DP2 CP2\n")
    assert memory_of(row, 4) == 80 * 10**9 > memory_of(row, 2) > 40 * 10**9
    whole, half = (long_sequences.planned(row, row.split, layers) for layers in (4, 2))
    assert whole and half and half.seconds == pytest.approx(whole.seconds, rel=0.03)
