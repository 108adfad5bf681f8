"""The page of messages quotes the program: what it says was found is said there; exit codes are its own."""

from __future__ import annotations

import ast
import re

import pytest

from autopar import errors
from autopar.runtime.launch.launch import WORKER_FAILED
from autopar.runtime.launch.leaving import LEFT
from tests.docs.blocks import ROOT, text_of

PAGE = "docs/troubleshooting.md"
QUOTED = re.findall(r"^\| `([^`]+)` \|", text_of(PAGE), re.MULTILINE)


def said() -> list[str]:
    """Every text of the program, formatted ones with their fixed parts side by side."""
    texts = []
    for path in (ROOT / "autopar").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


ALL_SAID = "\n".join(said())


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_the_page_quotes_is_said(quoted: str) -> None:
    parts = quoted.split(", wanted ")
    assert all(part in ALL_SAID for part in parts)


def test_the_page_has_messages() -> None:
    assert len(QUOTED) > 15


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|", text_of(PAGE), re.MULTILINE))
    assert {int(code) for code in rows} == {
        0,
        errors.CheckError.exit_code,
        errors.InputError.exit_code,
        errors.SolverError.exit_code,
        WORKER_FAILED,
        errors.INTERRUPTED,
        LEFT,
    }
