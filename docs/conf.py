"""Builds the pages as a site: the Markdown files as they are, and the references from the program itself.

docs/commands.md   from the command line's own help, by typer
docs/api.md        from the docstrings of autopar.__all__, by autodoc
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import typer.main
from typer.cli import get_docs_for_click

import autopar
from autopar.cli.commands import app as command_line

ROOT = Path(__file__).parents[1]
CHAPTERS = {  # of the site, each with its pages in the order of reading
    "Using it": (
        "features",
        "tutorial",
        "plans",
        "words",
        "training",
        "going_on",
        "updates",
        "multi_node",
        "precision",
        "custom_operators",
    ),
    "More of it": ("frameworks", "graphs", "clusters"),
    "Trusting it": ("proofs", "limits", "figures", "troubleshooting"),
    "Looking up": ("commands", "api"),
    "Understanding it": ("architecture", "theory/README", "theory/*"),
}

project = "autopar"
version = release = autopar.__version__
root_doc = "docs/README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**"]
exclude_patterns = ["docs/conf.py"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"autopar {version}"
html_copy_source = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"  # signatures show the others
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # the words of the source: no environment, no addresses
smartquotes = False  # two dashes are a flag


def commands() -> str:
    """Every command with its options, as typer tells them."""
    group = typer.main.get_command(command_line)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group), name="autopar", title="Commands")
    return re.sub(r"^# .*\n", "", text, count=1)


def api() -> str:
    """A section for each exported name."""
    blocks = (f"## {name}\n\n```{{eval-rst}}\n{_directive(name)}```\n" for name in autopar.__all__)
    return "\n".join(blocks)


def _directive(name: str) -> str:
    kind = "class" if inspect.isclass(getattr(autopar, name)) else "function"
    options = "   :members:\n" if kind == "class" else ""
    return f".. auto{kind}:: autopar.{name}\n{options}"


def fill_in(app: Any, page: str, source: list[str]) -> None:
    """Generated references in their places, and the site's table of contents on its first page."""
    if page == root_doc:
        source[0] += "\n" + "\n".join(map(_contents, CHAPTERS.items()))
    source[0] = source[0].replace("<!-- commands -->", commands()) if page == "docs/commands" else source[0]
    source[0] = source[0].replace("<!-- api -->", api()) if page == "docs/api" else source[0]


def _contents(chapter: tuple[str, tuple[str, ...]]) -> str:
    title, pages = chapter
    rows = "\n".join(f"/docs/{page}" for page in pages)
    more = "\n/README\n/CONTRIBUTING\n/CHANGELOG" if title == "Understanding it" else ""
    return f"```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n{rows}{more}\n```\n"


def as_rst(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings have code in `backquotes`, and drawings and code in blocks that are further indented."""
    written: list[str] = []
    for line in lines:
        indented = line.startswith("    ")
        if indented and not (written and written[-1].startswith("    ")) and not _in_block(written):
            written += ["", "::", ""] if not written or not written[-1] else ["", "::", ""]
        elif written and written[-1].startswith("    ") and line and not indented:
            written.append("")
        written.append(line if indented else _escaped(line))
    lines[:] = written


def _in_block(written: list[str]) -> bool:
    """Whether an empty line stands inside of a block."""
    before = [line for line in written if line]
    return bool(before) and before[-1].startswith("    ")


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(
        f"``{part[1:-1]}``" if part.startswith("`") and part.endswith("`") and len(part) > 2 else _plain(part)
        for part in parts
    )


def _plain(text: str) -> str:
    """Text in which no character is a mark."""
    return re.sub(r"(\w)_(?=\W|$)", r"\1\\_", re.sub(r"([*|\\])", r"\\\1", text))


def setup(app: Any) -> None:
    """Sphinx's hooks."""
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", as_rst)
