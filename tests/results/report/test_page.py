"""Pages of plans: their figures are the plan's, and nothing on them acts or asks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.api import timeline
from autopar.cli import main
from autopar.results.plan import Plan
from autopar.results.report.page import page
from autopar.units import show_bytes, show_seconds
from tests.results.report.read_page import at, read
from tests.results.report.reported_plans import HOSTILE, hostile, large, plain, staged

MOST = 2_000_000  # bytes of a page
OLD = Path(__file__).parents[1] / "files" / "plan_format_1.json"
PLANS = {"plain": plain, "staged": staged, "hostile": hostile}


def page_of(plan: Plan) -> str:
    return page(plan, timeline(plan) if plan.pipeline.is_staged else None)


@pytest.mark.parametrize("name", PLANS)
def test_every_figure_is_that_of_the_json(name: str) -> None:
    plan = PLANS[name]()
    document = json.loads(json.dumps(plan.as_dict()))
    figures = read(page_of(plan)).figures
    for figure in figures:
        assert figure.value == at(document, figure.key), figure
        shown = show_bytes if "bytes" in figure.key else show_seconds
        shares = {"gap": 2, "measured_share": 0, "sharded_flops_share": 1}
        digits = shares.get(figure.key)
        assert figure.text == (shown(figure.value) if digits is None else f"{figure.value:.{digits}%}")
    keys = {figure.key for figure in figures}
    assert {"step_seconds", "peak_bytes", "state_bytes", "gap", "parts.compute", "parts.hidden"} <= keys
    assert {"serial.step_seconds", "alternatives.0.peak_bytes", "layers.0.compute_seconds"} <= keys
    assert ("pipeline.stage_bytes.3" in keys) == (name == "staged")


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


@pytest.mark.parametrize("plan", [hostile(), large(), staged(256, 16)], ids=["hostile", "large", "staged"])
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
    assert text == page_of(Plan.load(saved)) and str(tmp_path) not in text
    assert main(["report", saved, "-o", str(output), "--json"]) == 0
    told, document = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json.loads(document) == {"report": str(output), "bytes": len(text.encode())}
    assert "page.html: " in "".join(told.splitlines())


def test_the_command_plans_a_target(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    words = ["report", "tests/targets.py:net", "--cluster", "local:2", "--no-measure", "-o", str(output)]
    assert main([*words, "--stages", "1"]) == 0
    text = output.read_text()
    assert "Strategies beside it" in text and "targets.py" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tests/targets.py:net"], "a target without a cluster"),
        (["plan.json", "--cluster", "local:2"], "--cluster: found a saved plan"),
        (["plan.json", "--no-measure"], "--no-measure: found a saved plan"),
        (["none.json"], "none.json: found No such file"),
    ],
)
def test_the_command_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
