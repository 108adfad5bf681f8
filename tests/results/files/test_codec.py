"""Plans as files: read back as they were, refused where another version or another hand wrote them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import plan
from autopar.cluster import ClusterSpec, Link
from autopar.core.move import Move
from autopar.core.placement import B, P, R, Shard
from autopar.errors import InputError
from autopar.results.files.codec import load, save
from autopar.results.plan.frontier import Frontier, Point
from autopar.results.plan.plan import Plan
from autopar.results.plan.step_parts import StepParts

X = torch.ones(8, 16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def plan_with(**options: Any) -> Plan:
    gpus = ClusterSpec(devices_per_node=4, device="h100", host=Link(bandwidth=25e9, latency=1e-5))
    return plan(Net(), gpus, X, measure=False, **options)


def test_the_frontier_is_saved_with_a_plan(tmp_path: Path) -> None:
    points = (Point(None, 0.1, 9_000, math.inf), Point(8_000, 0.2, 7_000, 0.0))
    saved = replace(
        plan_with(stages=1, micro_batches=1), frontier=Frontier(points, infeasible=6_000, untried=2)
    )
    saved.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == saved
    assert saved.as_dict()["frontier"]["points"][1]["peak_bytes"] == 7_000


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1, "micro_batches": 1},
        {"stages": 1, "micro_batches": 1, "mesh": "2x2", "force": "batch+filter"},
        {"stages": 2, "micro_batches": 4, "schedule": "zbv"},
        {"stages": 1, "micro_batches": 1, "recompute": "all", "offload": "none"},
        {"stages": 1, "micro_batches": 1, "shard_state": "weights"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_plan_is_read_as_it_was_saved(options: dict[str, Any], tmp_path: Path) -> None:
    saved = plan_with(**options)
    saved.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == saved and str(read) == str(saved)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_every_placement_is_read_as_it_was_saved(tmp_path: Path) -> None:
    layout = (Shard(0), Shard(2, 1), R, P, B)
    save(Move(1, layout, (*layout[:1], R, *layout[2:])), tmp_path / "move.json")
    assert load(Move, tmp_path / "move.json") == Move(1, layout, (*layout[:1], R, *layout[2:]))


def test_a_file_of_the_format_before_is_read() -> None:
    plan = Plan.load(Path(__file__).parent / "plan_format_1.json")
    assert plan.parts == StepParts() and plan.pipeline.num_stages == 2
    assert all(item.reason == "" for item in plan.alternatives)
    text = str(plan)  # prints what it knows: compute, communication, waits
    assert "waits for stages that still compute" in text and "sums of gradients, once" not in text


def test_a_file_of_another_version_is_read_if_its_format_is_known(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved = plan_with(stages=1, micro_batches=1)
    saved.save(path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"autopar": "9.9"}))
    assert Plan.load(path) == saved


def test_a_file_can_be_read_by_people(tmp_path: Path) -> None:
    plan_with(stages=1, micro_batches=1, mesh="4", force="batch").save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert '   "mesh": "4",' in lines
    assert any(line.strip() == '"operands": ["S(0)", "B", "B"],' for line in lines)


Spoil = Callable[[dict[str, Any]], None]
SPOILED: dict[str, tuple[Spoil, str]] = {
    "a later format": (lambda d: d.update(format=3), "found format 3 of autopar .*, wanted format 1 or 2"),
    "a format long ago": (
        lambda d: d.update(format=0, autopar="0.0.1"),
        r"found format 0 of autopar 0\.0\.1",
    ),
    "another kind": (lambda d: d.update(kind="Comparison"), "found kind 'Comparison', wanted kind 'Plan'"),
    "no version": (lambda d: d.pop("autopar"), "found other JSON"),
    "a field is missing": (lambda d: d["result"].pop("gap"), r"required field missing @ result\.gap"),
    "a field too many": (lambda d: d["result"].update(speed=1), r"extra fields found \(speed\)"),
    "no placement": (
        lambda d: d["result"]["program"]["inputs"].update(input_0=["S(a)"]),
        r"'S\(a\)' is no placement.* @ result\.program\.inputs\['input_0'\]\[0\]",
    ),
    "no mesh": (lambda d: d["result"]["program"].update(mesh="2y2"), r"result\.program\.mesh"),
    "no number": (lambda d: d["result"].update(peak_bytes="much"), r"result\.peak_bytes"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_wrong_with_a_file_is_named(case: str, tmp_path: Path) -> None:
    spoil, message = SPOILED[case]
    path = tmp_path / "plan.json"
    plan_with(stages=1, micro_batches=1).save(path)
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message) as refused:
        Plan.load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"kind": "Plan"', "\x00"])
def test_a_file_that_holds_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"plan\.json"):
        Plan.load(path)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json: found no such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"no_folder/plan\.json: found .*No such file"):
        plan_with(stages=1, micro_batches=1).save(tmp_path / "no_folder" / "plan.json")


def test_a_file_is_kept_where_the_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    saved = plan_with(stages=1, micro_batches=1)
    saved.save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        plan_with(stages=1, micro_batches=1, mesh="2x2").save(path)
    assert Plan.load(path) == saved
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


BROKEN: dict[str, tuple[Spoil, str]] = {
    "no number": (lambda d: d["result"].update(step_seconds=float("nan")), "nan @ result.step_seconds"),
    "seconds beyond all bounds": (
        lambda d: d["result"].update(step_seconds=1e300),
        r"1e\+300 @ result.step_seconds",
    ),
    "a negative one": (lambda d: d["result"].update(peak_bytes=-5), "-5 @ result.peak_bytes"),
    "a number as text": (lambda d: d["result"].update(peak_bytes="5"), "'5' is no int @ result.peak_bytes"),
    "a layout too short": (
        lambda d: d["result"]["program"]["inputs"].update(input_0=[]),
        r"0 for a mesh of 1 axes @ result.program.inputs\['input_0'\]",
    ),
    "a layer too wide": (
        lambda d: d["result"]["layers"][0].update(kinds=["batch", "batch"]),
        r"2 for a mesh of 1 axes @ result.layers\[0\].kinds",
    ),
    "a group of a weight without a gather": (
        lambda d: d["result"]["program"].update(together=[["input_0", "input_0"]]),
        r"\['input_0', 'input_0'\]|\('input_0', 'input_0'\) @ result.program.together\[0\]",
    ),
    "a weight on the host that is no input": (
        lambda d: d["result"]["program"].update(on_host=["other"]),
        r"'other' @ result.program.on_host",
    ),
    "a weight that comes ahead from nowhere": (
        lambda d: d["result"]["program"].update(ahead=["input_0"]),
        r"'input_0' @ result.program.ahead",
    ),
    "weights on the host of stages": (
        lambda d: (
            d["result"]["program"].update(on_host=["input_0"]),
            d["result"]["pipeline"].update(ranks=2, starts=[0, 2]),
        ),
        r"'input_0' @ result.program.on_host",
    ),
    "starts that go back": (
        lambda d: d["result"]["pipeline"].update(starts=[0, 3, 2]),
        "which don't ascend from 0 @ result.pipeline",
    ),
    "stages without costs": (
        lambda d: d["result"]["pipeline"].update(ranks=2, starts=[0, 2]),
        "0 with costs",
    ),
    "far too many micro-batches": (
        lambda d: d["result"]["pipeline"].update(micro_batches=10**9),
        "1 stages by 1000000000 micro-batches",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_plan_that_can_not_be_is_refused(case: str, tmp_path: Path) -> None:
    spoil, message = BROKEN[case]
    path = tmp_path / "plan.json"
    plan_with(stages=1, micro_batches=1, mesh="4").save(path)
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message):
        Plan.load(path)


def test_a_gap_without_a_bound_is_read(tmp_path: Path) -> None:
    saved = replace(plan_with(stages=1, micro_batches=1), gap=math.inf)
    saved.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == saved
