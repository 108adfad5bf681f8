"""What a notebook shows of results that have no picture: what `print` shows, as it is."""

from __future__ import annotations

from dataclasses import replace
from html import unescape

import pytest

from autopar.comparing.profile import Profile
from autopar.results.comparison.comparison import Comparison
from autopar.results.difference.difference import difference
from costdb.setting import Setting
from tests.results.comparison.test_comparison import a_row
from tests.results.explanation.test_render_explanation import FOUND
from tests.results.plan.test_render_plan import BIG

RESULTS = (
    Comparison("<here>", None, (a_row("<data>", 1.0, None),), "<data>"),
    replace(FOUND, data_parallel="as <data> goes"),
    difference(BIG, replace(BIG, step_seconds=1.0), names=("<a>", "b")),
    Profile("<costs.db>", Setting("cpu", "2.13", 1), (), 0, None),
)


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_a_notebook_shows_what_print_does_and_no_tags_of_users(
    result: Comparison | Profile,
) -> None:
    page = result._repr_html_()
    assert page.startswith("<pre>") and unescape(page[5:-6]) == str(result) and "<" in str(result)
    assert page.count("<") == 2
