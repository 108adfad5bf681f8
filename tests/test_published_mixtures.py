"""Published rows of mixtures are read, and their splits priced."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import InputError
from tests.benchmarks.published.mixtures import JOBS, MixtureRow, priced, read

HEAD = "model,cluster,sequence,global_batch,split,figure,unit,peak_gib,note\n"
MODEL = "Qwen3.6-35B-A3B 20 layers"
TEXT = f"""{MODEL},2x8 H100,1024,,ZeRO-3 TP1 EP1,1000,tokens/s/GPU,,
{MODEL},2x8 H100,1024,,ZeRO-1 TP1 DP16 EP8,2000,tokens/s/GPU,,
{MODEL},2x8 H100,1024,,TP2 DP8 EP8,1500,tokens/s/GPU,,
"""


def test_rows_of_other_splits_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(HEAD + TEXT)
    assert read(path) == [
        MixtureRow(MODEL, "ZeRO-3 TP1 EP1", 1000.0),
        MixtureRow(MODEL, "ZeRO-1 TP1 DP16 EP8", 2000.0),
    ]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", HEAD + TEXT.replace("1000", "much")])
def test_a_file_of_something_else_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(InputError, match="rows.csv: found .*, wanted model,cluster"):
        read(path)


@pytest.mark.slow
def test_experts_that_lie_on_a_node_are_predicted_faster_than_gathered_ones() -> None:
    rows = [MixtureRow(MODEL, split, 1.0) for split in JOBS[MODEL].splits]
    gathered, split = priced(rows, layers=1)
    assert gathered.predicted_ratio == 1 and split.predicted_ratio > 1.5
