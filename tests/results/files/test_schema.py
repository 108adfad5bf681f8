"""The schema of plan files: what is saved fits it, what is refused doesn't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.results.files.schema import schema_of
from autopar.results.plan.plan import Plan
from tests.results.files.test_codec import plan_with

jsonschema = pytest.importorskip("jsonschema")
OLD = Path(__file__).parent / "plan_format_1.json"
Spoil = Callable[[dict[str, Any]], None]


def faults(document: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema_of(Plan))
    return [error.message for error in validator.iter_errors(document)]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(Plan))


@pytest.mark.parametrize(
    "options",
    [{"stages": 1, "micro_batches": 1}, {"stages": 2, "micro_batches": 4, "schedule": "zbv"}],
    ids=["plain", "staged"],
)
def test_saved_plans_fit_the_schema(options: dict[str, Any], tmp_path: Path) -> None:
    plan_with(**options).save(tmp_path / "plan.json")
    assert faults(json.loads((tmp_path / "plan.json").read_text())) == []


def test_files_of_the_format_before_fit_it_too() -> None:
    assert faults(json.loads(OLD.read_text())) == []


SPOILED: dict[str, Spoil] = {
    "format": lambda d: d.update(format=7),
    "kind": lambda d: d.update(kind="Comparison"),
    "missing": lambda d: d["result"].pop("gap"),
    "extra": lambda d: d["result"].update(speed=1),
    "placement": lambda d: d["result"]["program"]["outputs"].update(x=["S(a)"]),
    "mesh": lambda d: d["result"]["program"].update(mesh="2y2"),
    "number": lambda d: d["result"].update(peak_bytes="much"),
    "schedule": lambda d: d["result"]["pipeline"].update(schedule="best"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_the_reader_refuses_does_not_fit(case: str, tmp_path: Path) -> None:
    document = json.loads(OLD.read_text())
    SPOILED[case](document)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InputError):
        Plan.load(tmp_path / "plan.json")
    assert faults(document)
