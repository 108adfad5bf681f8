"""What this process has, and what it would be told to install."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.doctor import installation as parts
from autopar.doctor.installation import LIBRARIES, PYTHON, installation
from autopar.results.explanation.examination import Examination, Finding, State, ok, warn, wrong
from autopar.results.files.text import text_of
from autopar.torch_seams.torch_version import RANGE
from costdb import database
from costdb.database import Database
from costdb.setting import Setting
from tests.costdb.test_database import operator

ROOT = Path(__file__).parents[2]


def finding(found: Examination | list[Finding], what: str) -> Finding:
    (one,) = [each for each in getattr(found, "findings", found) if each.what == what]
    return one


def test_the_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, PYTHON))
    names = [text.split(">")[0].split("<")[0] for text in project["dependencies"]]
    assert names == ["torch", *LIBRARIES]
    assert project["dependencies"][0] == RANGE


@pytest.mark.parametrize(
    ("version", "state"), [("2.11.1", State.WRONG), ("2.13.0+cu128", State.OK), ("2.16.0", State.WRONG)]
)
def test_a_torch_that_was_never_tried_is_wrong(version: str, state: State) -> None:
    assert parts._torch(version).state is state


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LIBRARIES", ("rich", "nothing-like-it"))
    assert "pip install nothing-like-it" in parts._libraries().remedy


def test_a_database_that_cannot_be_used_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "costs.db").write_text("no database" * 100)
    found = finding(list(installation(str(tmp_path / "costs.db"))), "cost database")
    assert found.state is State.WRONG and "--costdb" in found.remedy


def test_what_was_measured_alone_and_beside_others_counts(tmp_path: Path) -> None:
    path, here = tmp_path / "costs.db", Setting.here()
    busy = replace(here, fingerprint=f"{here.fingerprint}; 2 busy")
    with Database.open(path) as known:
        known.write_operators(here, [operator("add"), operator("mul")])
        known.write_operators(busy, [operator("add")])
        known.write_operators(replace(here, fingerprint="another"), [operator("add")])
    assert "3 operators measured on devices like this one" in parts._database(str(path)).found


def test_a_database_that_another_process_keeps_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CHECK_SECONDS", 0.05)
    path = tmp_path / "costs.db"
    assert parts._database(str(path)).state is State.OK
    with Database.open(path) as other, other._transaction():
        found = parts._database(str(path))
    assert found.state is State.WRONG and "locked" in found.found


def test_a_folder_without_room_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "LEAST_SPACE", 1 << 60)
    assert parts._temporary_files(tmp_path).state is State.WARN
    assert parts._temporary_files(tmp_path / "none").state is State.WRONG


def test_the_command_prints_a_line_for_each_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["doctor", "--costdb", str(tmp_path / "costs.db")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and all(f" {each['what']} " in text for each in found["findings"])


def test_a_wrong_finding_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "costs.db").write_text("no database" * 100)
    assert main(["doctor", "--costdb", str(tmp_path / "costs.db")]) == 1
    assert "wrong" in capsys.readouterr().out


def test_an_examination_says_how_many_are_not_well() -> None:
    found = Examination((ok("a", "b"), warn("c", "d", "mend it"), wrong("e", "f", "mend it too")))
    text = text_of(found)
    assert "-> mend it too" in text and text.endswith("1 wrong, 1 to look at, 1 well.")
    assert text_of(Examination((ok("a", "b"),))).endswith("All is well.")
