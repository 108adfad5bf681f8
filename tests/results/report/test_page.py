"""Pages of plans: their figures are the plan's, and nothing on them acts or asks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.api import timeline
from autopar.cli import main
from autopar.errors import InputError
from autopar.results.plan.plan import Plan
from autopar.results.report.page import PageSupplements, page
from autopar.units import show_bytes, show_seconds
from tests.results.report.read_page import at, read
from tests.results.report.reported_plans import (
    HOSTILE,
    frontier,
    hostile,
    large,
    long,
    measured,
    plain,
    staged,
    timed,
)

MOST = 2_000_000  # bytes of a page
OLD = Path(__file__).parents[1] / "files" / "plan_format_1.json"
PLANS = {"plain": plain, "staged": staged, "hostile": hostile, "timed": timed}


def beside(plan: Plan) -> PageSupplements:
    known = bool(plan.moments or plan.stage_costs)
    return PageSupplements(timeline(plan) if known else None, frontier(plan), measured(plan))


def page_of(plan: Plan) -> str:
    return page(plan, beside(plan))


@pytest.mark.parametrize("name", PLANS)
def test_every_figure_is_that_of_the_json(name: str) -> None:
    plan = PLANS[name]()
    document = json.loads(json.dumps(plan.as_dict() | beside(plan).as_dict()))
    figures = read(page_of(plan)).figures
    for figure in figures:
        assert figure.value == at(document, figure.key), figure
        shown = show_bytes if "bytes" in figure.key else show_seconds
        shares = {"gap": 2, "measured_share": 0, "sharded_flops_share": 1}
        digits = shares.get(figure.key.rpartition(".")[2])
        assert figure.text == (shown(figure.value) if digits is None else f"{figure.value:.{digits}%}")
    keys = {figure.key for figure in figures}
    assert {"step_seconds", "peak_bytes", "state_bytes", "gap", "parts.compute", "parts.hidden"} <= keys
    assert {"serial.step_seconds", "alternatives.0.peak_bytes", "layers.0.compute_seconds"} <= keys
    assert {"frontier.points.2.peak_bytes", "measured.steps.1.measured_step_seconds"} <= keys
    assert ("pipeline.stage_bytes.3" in keys) == (name == "staged")
    assert ("moments.10.bytes" in keys) == (name == "timed")


def test_parts_fill_the_bar_of_the_step() -> None:
    bars = re.findall(r'class="part-(\w+)" x="([\d.]+)" y="0.0" width="([\d.]+)"', page(plain()))
    pieces = {name: (float(start), float(width)) for name, start, width in bars[:4]}
    assert pieces == {
        "compute": (0, 400),
        "communication": (400, 50),
        "sums": (450, 475),
        "optimizer": (925, 75),
    }


def test_equal_blocks_stand_once_and_small_operators_in_the_table_alone() -> None:
    words = read(page(plain())).words
    assert words.count("h.0 … h.2, each:") == words.count("h.3 … h.4, each:") == 2
    assert words.count(".attn") == 4 and words.count("last.add") == 1
    assert "In the table alone: 1 small operator." in words


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [hostile(), large(), long(), staged(256, 16)], ids=["hostile", "large", "long", "staged"]
)
def test_a_page_is_small_and_asks_for_nothing(plan: Plan) -> None:
    text = page_of(plan)
    assert len(text.encode()) <= MOST
    assert not re.search(r"https?:|//\w", text)
    for tag, attributes in read(text).tags:
        assert tag not in {"script", "img", "iframe", "object", "form", "a"}
        assert not [name for name in attributes if name == "src" or name.startswith("on")]
        assert tag != "link" or attributes["href"] == "data:,"


def test_words_of_a_plan_are_text() -> None:
    found = read(page(hostile()))
    assert HOSTILE[:100] in found.words and "49" not in found.words
    assert HOSTILE[:100] in hostile().cluster
    assert "<script" not in hostile()._repr_html_()


def test_a_model_of_one_operator_has_a_name() -> None:
    one = replace(plain(), layers=plain().layers[:1])
    text = page(one)
    assert text.count('<section class="one">') == 1
    assert read(text).words.count("h.0.attn") == 2


def test_an_old_plan_has_a_page() -> None:
    plan = Plan.load(OLD)
    assert show_seconds(plan.step_seconds) in read(page_of(plan)).words


def test_a_plan_of_no_seconds_has_a_page() -> None:
    empty = replace(plain(), layers=(), step_seconds=0.0, serial=None, alternatives=())
    assert "Strategies beside it" not in read(page(empty)).words


def test_a_step_without_stages_has_its_phases_and_its_memory_over_time() -> None:
    text = page_of(timed())
    words = read(text).words
    assert "its 2 micro-batches in turn" in words and "there all step" in words
    assert text.count('class="time-forward"') > 2 * 2 and 'class="part-recompute"' in text
    assert "h.4.mlp forward of micro-batch 1: 4.31 ms to 4.41 ms" in text
    curve = re.search(r'polygon class="held" points="([^"]*)"', text)
    assert curve
    tops = [float(point.split(",")[1]) for point in curve[1].split()]
    assert min(tops) == 0.0 and "whole height is 20 MB" in words  # the fullest of 10 + 10 MB fills the line


def test_memory_that_is_there_all_step_is_drawn_below() -> None:
    found = re.search(r'class="lasts" x="0" y="([\d.]+)" width="1000" height="([\d.]+)"', page_of(timed()))
    assert found and [float(each) for each in found.groups()] == [500.0, 500.0]


def test_the_frontier_is_drawn_to_scale_with_the_plan_among_its_points() -> None:
    text = page_of(plain())
    spots = re.findall(r'<i class="(\w+)" style="left:([\d.]+)%;top:([\d.]+)%"', text)
    places = [(colour, float(left), float(top)) for colour, left, top in spots]
    assert [colour for colour, _, _ in places] == ["taken", "other", "other"]
    lefts = [left for _, left, _ in places]
    assert lefts[1] - lefts[0] == pytest.approx(lefts[2] - lefts[1], abs=0.02)
    assert places[0][2] < places[1][2] < places[2][2]  # less memory is lower
    words = read(text).words
    assert "No plan was found under 500 MB." in words and "Time was over before 1 lower cap." in words


def test_predicted_steps_stand_above_measured_ones_and_another_plan_is_told() -> None:
    text = page_of(plain())
    assert "The plan that ran" not in text and "-9.1%" in text
    bands = re.findall(r'y="([\d.]+)" width="([\d.]+)" height="0.5"><title>(predicted|measured)', text)
    assert [(float(top), kind) for top, _, kind in bands[:2]] == [(0, "predicted"), (0.5, "measured")]
    assert float(bands[1][1]) / float(bands[0][1]) == pytest.approx(1.1, rel=1e-3)
    other = page(replace(plain(), step_seconds=0.03), PageSupplements(measured=measured(plain())))
    assert "The plan that ran was predicted to take 20 ms, this one 30 ms" in other


def test_what_a_file_does_not_tell_is_said() -> None:
    words = read(page(plain())).words
    assert "Time and memory during the step" in words and "What less memory would cost" in words
    assert "doesn't show" not in read(page_of(timed())).words


def test_a_notebook_shows_the_key_figures() -> None:
    shown = plain()._repr_html_()
    assert shown.startswith("<table>") and "20 ms" in shown and "1.07 GB" in shown and "1.23%" in shown


def test_the_command_writes_the_page_of_a_saved_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, output = str(tmp_path / "plan.json"), tmp_path / "page.html"
    staged().save(saved)
    assert main(["report", saved, "-o", str(output)]) == 0
    text = output.read_text()
    loaded = Plan.load(saved)
    assert text == page(loaded, PageSupplements(timeline(loaded))) and str(tmp_path) not in text
    assert main(["report", saved, "-o", str(output), "--json"]) == 0
    told, document = capsys.readouterr().out.rsplit("\n", 2)[:2]
    own = {"report": str(output), "bytes": len(text.encode())}
    assert json.loads(document) == own | {"frontier": None, "measured": None}
    assert "page.html: " in "".join(told.splitlines())


def test_a_saved_plan_shows_what_less_memory_would_cost_if_it_was_found_with_it(tmp_path: Path) -> None:
    saved, output = tmp_path / "plan.json", tmp_path / "page.html"
    words = ["plan", "tests/targets.py:net", "--cluster", "local:2", "--no-measure", "--stages", "1"]
    assert main([*words, "--frontier", "3", "-o", str(saved)]) == 0
    found = Plan.load(saved).frontier
    assert found is not None and found.points[0].step_seconds == Plan.load(saved).step_seconds
    assert main(["report", str(saved), "-o", str(output)]) == 0
    assert "Time and memory<" in output.read_text()


def test_the_command_plans_a_target(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    words = ["report", "tests/targets.py:net", "--cluster", "local:2", "--no-measure", "-o", str(output)]
    assert main([*words, "--stages", "1", "--frontier", "0"]) == 0
    text = output.read_text()
    assert "Strategies beside it" in text and "targets.py" not in text
    assert "Memory over time" in text and "Time and memory<" not in text


def test_measured_steps_of_a_comparison_stand_beside_a_saved_plan(tmp_path: Path) -> None:
    saved, output, steps = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "measured.json"
    plain().save(saved)
    ran = {"name": "hybrid", "step_seconds": 0.02, "measured_step_seconds": 0.022}
    ran |= {"peak_bytes": 5, "measured_peak_bytes": 6}
    rows = [ran, {"name": "batch", "step_seconds": 0.03, "measured_step_seconds": None}]
    steps.write_text(json.dumps({"rows": rows, "chosen": "hybrid"}))
    assert main(["report", str(saved), "--measured", str(steps), "-o", str(output)]) == 0
    assert "measured: 22 ms" in output.read_text()


def test_the_door_takes_a_plan_its_file_or_a_model(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    staged().save(tmp_path / "plan.json")
    for source in (staged(), tmp_path / "plan.json"):
        assert autopar.report(source, output=output).nbytes == len(output.read_bytes())
    model, x = torch.nn.Linear(64, 64), torch.zeros(64, 64)
    cluster = autopar.ClusterSpec.local(2)
    found = autopar.report(model, cluster, x, output=output, measure=False, stages=1, frontier_seconds=1)
    assert found.plan.moments and found.beside.frontier and found.beside.frontier.points
    with pytest.raises(InputError, match="cluster"):
        autopar.report(staged(), cluster, output=output)
    with pytest.raises(InputError, match="ClusterSpec"):
        autopar.report(model, None, x, output=output)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tests/targets.py:net"], "a target without a cluster"),
        (["plan.json", "--cluster", "local:2"], "--cluster: found a saved plan"),
        (["plan.json", "--no-measure"], "--no-measure: found a saved plan"),
        (["none.json"], "none.json: found no such file"),
        (["plan.json", "--frontier", "3"], "--frontier: found a saved plan"),
        (["tests/targets.py:net", "--cluster", "local:2", "--frontier", "-1"], "--frontier: found -1 s"),
        (["none.json", "--measured", "none.json"], "none.json: found No such file"),
    ],
)
def test_the_command_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_parts_that_change_no_digit_of_the_step_are_left_out_as_in_the_printed_plan() -> None:
    plan = plain()
    parts = replace(plan.parts, ties=1e-6 * plan.step_seconds)
    assert "what the search adds" not in page(replace(plan, parts=parts))
    assert "what the search adds" in page(replace(plan, parts=replace(parts, ties=0.1 * plan.step_seconds)))
