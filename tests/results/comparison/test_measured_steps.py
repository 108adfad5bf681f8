"""Measured steps are read from a comparison's JSON, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.results.comparison.comparison import Comparison, Measured, Row
from autopar.results.comparison.measured_steps import MeasuredSteps, read_measured
from tests.results.report.reported_plans import plain

RAN: dict[str, Any] = {
    "name": "hybrid",
    "step_seconds": 0.02,
    "measured_step_seconds": 0.03,
    "peak_bytes": 4,
    "measured_peak_bytes": 5,
}


def test_a_comparison_reads_back_from_its_json(tmp_path: Path) -> None:
    rows = Row("hybrid", plain(), None, None, Measured(0.021, 7)), Row("domain", None, None, "no dim")
    comparison = Comparison("two devices", None, rows, "hybrid")
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(comparison.as_dict()))
    found = read_measured(path)
    assert found == MeasuredSteps.of(comparison)
    assert [step.name for step in found.steps] == ["hybrid"] and found.chosen == "hybrid"
    assert found.steps[0].measured_step_seconds == 0.021 and found.steps[0].peak_bytes == plain().peak_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 5000,
        "9" * 5000,
        json.dumps({"rows": 3}),
        json.dumps({"rows": [3]}),
        json.dumps({"rows": []}),
        json.dumps({"rows": [RAN | {"measured_step_seconds": None}]}),
        json.dumps({"rows": [RAN | {"step_seconds": None}]}),
        json.dumps({"rows": [RAN | {"step_seconds": float("nan")}]}),
        json.dumps({"rows": [RAN | {"peak_bytes": True}]}),
        json.dumps({"rows": [RAN | {"peak_bytes": "w" * 10**5}]}),
    ],
)
def test_other_files_are_refused_in_few_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(InputError, match="compare") as caught:
        read_measured(path)
    assert len(str(caught.value)) < 400 + len(str(path))
