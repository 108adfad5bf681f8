"""First lines of docstrings are one main clause, short, and name what they speak of.

A function that acts begins with its verb; a value, a class or a property may be a noun phrase ("Seconds of a
step"), whose head is a noun: not "the same", "that of" or "those".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_WORDS = 20
CLAUSE = re.compile(r"(?<=[.:;?!])\s|\n\s*\n")  # where the first one ends
HEADLESS = re.compile(r"(The (same|others?|rest)|That|Those|These|It|They|As|Of|So)\b")


def first_clause(docstring: str) -> str:
    """The text up to the first full stop, colon or semicolon."""
    return " ".join(CLAUSE.split(docstring.strip(), maxsplit=1)[0].split())


def faults(docstring: str) -> list[str]:
    """What is wrong with the first line of a docstring."""
    clause = first_clause(docstring)
    found = []
    if len(clause.split()) > MOST_WORDS:
        found.append(f"{len(clause.split())} words")
    if HEADLESS.match(clause):
        found.append(f"no noun before {clause.split()[0]!r}")
    return found


@cache
def docstrings() -> tuple[tuple[str, str], ...]:
    """Each docstring with its place."""
    return tuple(_docstrings())


def _docstrings() -> Iterator[tuple[str, str]]:
    for folder in ("autopar", "costdb"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text:
                        name = getattr(node, "name", "the file")
                        yield f"{path.relative_to(ROOT)}: {name}", text


def test_first_lines_are_short_and_name_what_they_speak_of() -> None:
    assert len(docstrings()) > 3000
    wrong = [f"{place}: {', '.join(found)}" for place, text in docstrings() if (found := faults(text))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("docstring", "count"),
    [
        ("Seconds of a step.", 0),
        ("This cluster with other links.", 0),
        ("The same layer over more steps.", 1),
        ("Those of one stage; none without.", 1),
        ("As `staged` says it.", 1),
        ("Of the fastest run: others share the machine.", 1),
        (" ".join(["word"] * 21) + ".", 1),
        ("Short: " + " ".join(["word"] * 30), 0),
        ("Thosewords are one word.", 0),
    ],
)
def test_faults_of_first_lines_are_seen(docstring: str, count: int) -> None:
    assert len(faults(docstring)) == count
