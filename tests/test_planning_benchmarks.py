"""The zoo's list and its results, and the ablation of the program, in small."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster import ClusterSpec, Link
from autopar.errors import InfeasibleError, InputError
from tests.benchmarks import ablation

for package in ("diffusers", "monai", "transformers"):
    pytest.importorskip(package)

from tests.benchmarks.zoo import __main__ as zoo  # noqa: E402
from tests.benchmarks.zoo.answers import RowAnswer, told, words  # noqa: E402
from tests.benchmarks.zoo.rows import MODELS, rows  # noqa: E402

KNOWN = RowAnswer("resnet-50 8 h100", 256, 45.0, wall=90.0, cpu=30.0)


def test_the_zoo_has_eighty_rows_of_thirty_models() -> None:
    assert len(MODELS) == 30
    assert Counter(row.machines.name for row in rows()) == {
        "8 h100": 30,
        "64 h100": 30,
        "256 h100": 10,
        "32 v100": 10,
    }
    assert len({row.file for row in rows()}) == 80


@pytest.mark.parametrize("name", ["resnet-50", "dlrm", "unet-3d"])
def test_models_of_the_zoo_have_one_dtype_and_no_memory(name: str) -> None:
    model, inputs, _ = next(each for each in MODELS if each.name == name).make(2)
    parameters = list(model.parameters())
    assert {each.dtype for each in parameters} == {torch.float32}
    assert {each.device.type for each in parameters} == {"meta"}
    assert inputs


def test_a_row_that_was_planned_is_not_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.subprocess, "run", None)
    row = next(row for row in rows() if row.name == KNOWN.name)
    zoo.write(KNOWN, tmp_path / row.file)
    assert zoo.plan_apart(row, tmp_path) == KNOWN
    assert json.loads((tmp_path / row.file).read_text()) == asdict(KNOWN)


def test_what_failed_is_told_from_what_does_not_fit() -> None:
    parts = {"where": "a", "found": "b", "wanted": "c", "remedy": "d"}
    fits_not = told(KNOWN, InfeasibleError(**parts, least=10**9))
    assert (fits_not.failure, fits_not.peak_bytes, fits_not.plan) == ("", 10**9, "infeasible")
    assert told(KNOWN, InputError(**parts)).failure.startswith("InputError: a")
    assert told(KNOWN, InfeasibleError(**parts)).failure  # no least is named


def test_a_plan_is_told_in_words_and_the_table_says_what_it_comes_to(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 16)).to("meta")
    cluster = ClusterSpec(devices_per_node=2, device="h100", memory="80GB", intra=Link(5e-6, 450e9))
    x = torch.zeros(65536, 4096, device="meta")
    plan = autopar.plan(net, cluster, x, measure=False, stages=1, micro_batches=1, mesh="2", force="batch")
    assert words(plan) == "2 batch"
    found = told(KNOWN, plan)
    assert found.step == plan.step_seconds and not found.binds and not found.failure
    zoo.write_table([found], tmp_path / "table.csv")
    head, line = csv.reader((tmp_path / "table.csv").open())
    assert dict(zip(head, line, strict=True))["plan"] == "2 batch"
    assert zoo.summary([found]).startswith("1 rows, 0 failures, 0 beyond")


def test_a_gap_leaves_out_what_was_passed_over_for_something_simpler() -> None:
    simple = RowAnswer("a", 1, 45.0, 1.0, 1.0, gap=0.1, less=0.08)
    assert simple.distance == pytest.approx(1 - 0.9 / 0.92)
    assert RowAnswer("a", 1, 45.0, 1.0, 1.0, gap=0.1).distance == pytest.approx(0.1)


def test_no_way_beats_the_bound_and_none_that_is_simpler_the_program() -> None:
    case = ablation.Case("small", lambda: ablation.transformer(2, 512, 32768, 16))
    program, cut_first, greedy, bound = ablation.run(case)
    assert [each.way for each in (program, cut_first, greedy, bound)] == [
        "program",
        "cut first",
        "greedy",
        "LP bound",
    ]
    assert bound.step <= min(program.step, cut_first.step, greedy.step) * (1 + 1e-6)
    assert program.step <= min(cut_first.step, greedy.step) * 1.03  # sums of gradients that hide leave a gap
    assert math.isfinite(greedy.step)
