"""Pages of plans in a real browser, as wide as a phone and as a desktop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autopar.api import timeline
from autopar.results.plan.plan import Plan
from autopar.results.report.page import PageSupplements, write_page
from tests.results.report.read_page import at
from tests.results.report.reported_plans import frontier, hostile, large, long, measured, staged, timed

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or ""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = [pytest.mark.long, pytest.mark.skipif(not CHROMIUM, reason="no chromium")]
PLANS = {"hostile": hostile(), "large": large(), "long": long(), "staged": staged(), "timed": timed()}
FIGURES = "[...document.querySelectorAll('data')].map(each => [each.dataset.key, Number(each.value)])"
OPEN_ALL = "[...document.querySelectorAll('details')].forEach(each => each.open = true)"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_page_fits_has_the_figures_of_the_json_and_asks_for_nothing(
    plan: Plan, width: int, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    known = bool(plan.moments or plan.stage_costs)
    beside = PageSupplements(timeline(plan) if known else None, frontier(plan), measured(plan))
    write_page(plan, path, beside)
    said: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        shown = browser.new_page(viewport={"width": width, "height": 800})
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(path.as_uri())
        widths = [shown.evaluate("document.documentElement.scrollWidth")]
        shown.evaluate(OPEN_ALL)
        widths.append(shown.evaluate("document.documentElement.scrollWidth"))
        figures = shown.evaluate(FIGURES)
        browser.close()
    assert not said
    document = json.loads(json.dumps(plan.as_dict() | beside.as_dict()))
    assert figures and all(value == at(document, key) for key, value in figures)
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert max(widths) <= width
