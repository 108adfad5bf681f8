"""Pages of plans in a real browser, as wide as a phone and as a desktop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from autopar.api import timeline
from autopar.results.plan import Plan
from autopar.results.report.page import write_page
from tests.results.report.reported_plans import hostile, large, staged

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or ""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = [pytest.mark.long, pytest.mark.skipif(not CHROMIUM, reason="no chromium")]
OPEN_ALL = "[...document.querySelectorAll('details')].forEach(each => each.open = true)"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("plan", [hostile(), large(), staged()], ids=["hostile", "large", "staged"])
def test_a_page_fits_and_asks_nothing_of_a_network(plan: Plan, width: int, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(plan, path, timeline(plan) if plan.pipeline.is_staged else None)
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
        browser.close()
    assert not said
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert max(widths) <= width
