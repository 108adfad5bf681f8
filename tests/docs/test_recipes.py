"""The recipes of CONTRIBUTING.md are ten lines each, fit the code, and do what they promise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.recipes import ROOT, Recipe, recipes

MOST_LINES = 10
# In one process, as starting it takes longer than what is tried: tests first, then commands of autopar.
TRY = """
import contextlib, io, json, sys, pytest
tests, commands = json.loads(sys.argv[1])

class Passed:
    names = []
    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.names.append(report.nodeid)

words = ["-q", "-n", "0", "-p", "no:cacheprovider", *{file for file, _ in tests}]
code = int(pytest.main([*words, "-k", " or ".join(word for _, word in tests)], plugins=[passed := Passed()]))
from autopar.cli import main
printed = []
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        ended = main(command)
    printed.append([ended, out.getvalue()])
print(json.dumps([code, passed.names, printed]))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[tuple[int, str]]]:
    """All recipes followed in a copy of the code: the tests that passed there, and what commands printed."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("autopar", "costdb", "tests"):
        shutil.copytree(ROOT / folder, copy / folder)  # compiled files too, which takes seconds else
    shutil.copy(ROOT / "pyproject.toml", copy)
    for recipe in recipes():
        recipe.apply(copy)
    every = [command for recipe in recipes() for command in recipe.commands]
    tests = [(words[3], words[5]) for words in every if words[:3] == ("python", "-m", "pytest")]
    commands = [words[1:] for words in every if words[0] == "autopar"]
    assert len(tests) + len(commands) == len(every)
    done = subprocess.run(
        [sys.executable, "-c", TRY, json.dumps([tests, commands])],
        cwd=copy,
        env={"PYTHONPATH": str(copy), "PATH": "", "HOME": str(copy)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    code, passed, printed = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stdout
    return passed, printed


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_has_ten_lines(recipe: Recipe) -> None:
    assert 0 < len(recipe.added) <= MOST_LINES
    assert recipe.commands


def test_a_place_that_is_not_there_once_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for context in ("x = 1", "y = 1"):
        with pytest.raises(AssertionError, match=r"a.py has [02] times"):
            Recipe("", f"--- a.py\n {context}\n+z = 2\n", ()).apply(tmp_path)


@pytest.mark.slow
def test_an_added_operator_is_proved_in_parts(tried: tuple[list[str], list[tuple[int, str]]]) -> None:
    passed, _ = tried
    assert any(
        "test_every_strategy_equals_the_unsplit_operator" in name and "Outer" in name for name in passed
    )
    assert any("test_every_rule_shards_some_sample[Outer]" in name for name in passed)


@pytest.mark.slow
def test_an_added_schedule_is_torchs(tried: tuple[list[str], list[tuple[int, str]]]) -> None:
    passed, printed = tried
    assert any("test_orders_and_ranks_of_stages_are_torchs[bfs]" in name for name in passed)
    code, text = printed[0]
    assert code == 0 and "2 ranks, 4 stages, 4 micro-batches, bfs" in text


def test_an_added_option_is_heard(tried: tuple[list[str], list[tuple[int, str]]]) -> None:
    passed, printed = tried
    assert any("test_the_environment_says_an_option_by_words_of_its_type[axes]" in name for name in passed)
    code, text = printed[1]
    assert code == 0 and "mesh 4 " in text.replace("\n", " ")
