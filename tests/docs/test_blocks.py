"""Every block of README and the pages is run: files, commands in their order, pieces of Python.

So are whole commands in its lines. Commands for SLURM and for several nodes, and those that set up this
folder, are parsed alone (test_pages). By default only those run that need no model.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.cluster import ClusterSpec
from autopar.runtime.launch.launch import run_function
from tests import targets
from tests.docs.blocks import ELSEWHERE, HERE, PAGES, ROOT, Block, blocks_of, files_of, inline_commands
from tests.docs.framework_pieces import GivenOfFrameworks
from tests.docs.pieces import Given, run_pieces, taken_for_granted

GIVEN = ROOT / "tests" / "docs" / "given"
LEARNED = "docs/tutorial.md"  # whose files later pages name
SECONDS = 1800.0  # for one command; on a quiet machine none takes two minutes
OF_PLANS = ("show", "diff", "report")
FRAMEWORKS = "docs/frameworks.md"  # whose pieces take other things for granted
TRIED_ELSEWHERE = {"CONTRIBUTING.md"}  # by test_recipes


def commands_of(page: str) -> list[list[str]]:
    """Those that are run: of blocks, then of lines, which take what those of blocks write."""
    blocks = [words for block in blocks_of(page) for words in block.commands if words[0] in HERE]
    return [*blocks, *(words for words in inline_commands(page) if words not in blocks)]


WITH_COMMANDS = [page for page in PAGES if page not in TRIED_ELSEWHERE and commands_of(page)]


def pieces(pages: Iterable[str]) -> list[Block]:
    """Blocks of Python that are no files."""
    blocks = [block for page in pages for block in blocks_of(page)]
    return [block for block in blocks if block.language == "python" and not block.file]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reader's folder: the examples, and a project of one's own."""
    for path in GIVEN.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder / "data")}


def run(words: list[str], folder: Path) -> str | None:
    """What went wrong, None where the command ended with 0."""
    program = [sys.executable, *(("-m", "autopar") if words[0] == "autopar" else ())]
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode == 0:
        return None
    return f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    for page in PAGES:
        for block in blocks_of(page):
            assert block.language in ("", "python", "toml", "bash", "diff", "text"), str(block)
            if block.is_commands:
                wrong = [words for words in block.commands if not words[0].startswith((*HERE, *ELSEWHERE))]
                assert not wrong, (str(block), wrong)


def test_names_that_a_piece_takes_for_granted() -> None:
    text = "model = wrap(model)\nfor x in rows:\n    y = x\nprint(y)\ndef f():\n    return other(model)\n"
    assert sorted(taken_for_granted(text)) == ["model", "other", "print", "rows", "wrap"]


@pytest.mark.parametrize("page", PAGES)
def test_files_of_a_page_can_be_read(page: str, tmp_path: Path) -> None:
    for block in blocks_of(page):
        if block.language == "toml":
            path = tmp_path / (block.file or "cluster.toml")
            path.write_text(block.text)
            ClusterSpec.from_toml(path)
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.file:
            ast.parse(block.text)


@pytest.fixture(scope="module")
def saved_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    model, batch, loss = targets.net()
    autopar.plan(model, ClusterSpec.local(2), batch, loss_fn=loss, measure=False).save(path)
    return path


@pytest.mark.parametrize(
    "words",
    [words for page in WITH_COMMANDS for words in commands_of(page) if words[1] in OF_PLANS],
    ids=lambda words: " ".join(words[1:]),
)
def test_commands_about_saved_plans_end_well(
    words: list[str], saved_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "plan"):
        shutil.copy(saved_plan, tmp_path / f"{name}.json")
    if "--cluster" not in words:  # a report of a target plans it first
        assert main(words[1:]) == 0


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_of_a_page_end_well(page: str, folder: Path) -> None:
    for name, text in (files_of(LEARNED) | files_of(page)).items():
        (folder / name).write_text(text)
    if any("a.json" in words for words in commands_of(page)):
        save_plans(folder)
    failed = [said for words in commands_of(page) if (said := run(words, folder))]
    assert not failed, "\n\n".join(failed)


def save_plans(folder: Path) -> None:
    """The plans that a page compares and shows, and the one that it runs on four ranks."""
    for name, force, count in (("a", "batch", 2), ("b", "filter", 2), ("plan", "batch", 4)):
        words = f"autopar plan lm.py:lm --cluster local:{count} --no-measure --force {force} -o {name}.json"
        assert run(words.split(), folder) is None


@pytest.mark.long
@pytest.mark.parametrize("kind", [Given, GivenOfFrameworks])
def test_pieces_of_python_run_on_two_ranks(
    kind: type[Given], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    monkeypatch.chdir(folder)
    for name, text in files_of("docs/custom_operators.md").items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    found = pieces(
        [FRAMEWORKS] if kind is GivenOfFrameworks else [page for page in PAGES if page != FRAMEWORKS]
    )
    assert len(found) > 2
    for raised in run_function(run_pieces, 2, [block.text for block in found], kind, timeout=SECONDS):
        wrong = [f"{block}\n{said}" for block, said in zip(found, raised, strict=True) if said]
        assert not wrong, "\n\n".join(wrong)
