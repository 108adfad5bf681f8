"""What pages show as printed is what the command prints that they name before it, but for its figures.

Figures follow from the speed of a machine: numbers with a unit, and shares. Their lines, words, splits and
order don't, on as many cores as the pages say.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, text_of

CORES = 2  # of the machine that printed
COMMAND = re.compile(r"`(autopar [^`]+)`")
FIGURE = re.compile(r"[+-]?[\d.,]+ ?(?:[num]?s|[kMGT]?B|%)(?![\w/])|<= \d+|\d+ x (?=zb1p)")
LEFT_OUT = "..."


def printed() -> list[tuple[list[str], Block]]:
    """Each block whose paragraph before it names a command, with the command."""
    found = []
    for page in PAGES:
        for block in blocks_of(page):
            before = "\n".join(text_of(page).splitlines()[: block.line - 1]).rstrip()
            named = COMMAND.findall(before.rpartition("\n\n")[2])
            if block.language == "" and not block.is_commands and named:
                found.append((shlex.split(named[-1]), block))
    return found


PRINTED = printed()


def lines_of(text: str) -> list[str]:
    """Lines without figures and the width of columns."""
    return [" ".join(FIGURE.sub("#", line).split()) for line in text.splitlines() if line.strip()]


def missing(shown: str, told: str) -> list[str]:
    """Lines of `shown` that `told` doesn't have, in this order."""
    rest = iter(lines_of(told))
    return [line for line in lines_of(shown) if line != LEFT_OUT and line not in rest]


def test_figures_are_left_out_and_words_are_not() -> None:
    told = "conv  batch n  17.7 ms  +74.5%\nlinear  filter o  3 us\nstep  1 s\n"
    assert missing("conv batch n  1 ns  -2%\n...\nstep  2 s\n", told) == []
    assert missing("conv filter o  1 ns  2%\n", told) == ["conv filter o # #"]
    assert missing("step  1 s\nlinear  filter o  3 us\n", told) == ["linear filter o #"]
    assert missing("batch norm of 2 x 2\n", "batch norm of 3 x 2\n") == ["batch norm of 2 x 2"]


def test_pages_show_what_plan_explain_and_compare_print() -> None:
    assert {words[1] for words, _ in PRINTED} == {"plan", "explain", "compare"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "block"), PRINTED, ids=lambda item: str(item) if isinstance(item, Block) else ""
)
def test_a_command_prints_what_the_page_shows(words: list[str], block: Block, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) != CORES:
        pytest.skip(f"pages show what {CORES} cores print")
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert missing(block.text, done.stdout) == []
