"""The site: references come from the program, contents name every page, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html import unescape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

import autopar
from autopar.cli.commands import app
from tests.docs.blocks import PAGES, ROOT


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """How the site is made, without Sphinx."""
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "docs" / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_and_flag_is_in_the_reference(site: ModuleType) -> None:
    text = site.commands()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        _, _, section = text.partition(f"## `autopar {name}`\n")
        section = section.partition("\n## ")[0]
        flags = [flag for item in command.params for flag in item.opts if flag.startswith("--")]
        assert flags and all(f"`{flag}" in section or f" {flag}" in section for flag in flags), name


def test_every_name_is_in_the_reference(site: ModuleType) -> None:
    assert re.findall(r"^## (\w+)$", site.api(), re.MULTILINE) == autopar.__all__


def test_every_page_is_in_the_contents(site: ModuleType) -> None:
    listed = [f"docs/{page}" for pages in site.CHAPTERS.values() for page in pages]
    named = {page.removesuffix(".md") for page in PAGES} - {"README", "CONTRIBUTING", "docs/README"}
    rooms = {page.removesuffix("/*") for page in listed if page.endswith("/*")}
    assert {page for page in named if page.rpartition("/")[0] not in rooms} <= {*listed}
    assert all((ROOT / f"{page}.md").is_file() for page in listed if not page.endswith("*"))


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("`Plan.save` of a_ and *args", "``Plan.save`` of a\\_ and \\*args"),
        ("plan_to_run", "plan_to_run"),
        ("a | b", "a \\| b"),
    ],
)
def test_docstrings_are_plain_text(site: ModuleType, line: str, written: str) -> None:
    lines = [line]
    site.as_rst(None, "", "", None, None, lines)
    assert lines == [written]


def test_drawings_are_kept_as_they_are(site: ModuleType) -> None:
    lines = ["Text:", "", "    a_  |  *b", "", "    c", "", "More."]
    site.as_rst(None, "", "", None, None, lines)
    assert [line for line in lines if line] == ["Text:", "::", "    a_  |  *b", "    c", "More."]


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    try:
        version("sphinx")
    except PackageNotFoundError:
        pytest.skip("pip install -e '.[docs]' brings Sphinx")
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = unescape((tmp_path / "docs" / "api.html").read_text())
    assert "environ({" not in page and str(Path.home()) not in page
