"""A default database that can't be used stops no command: memory stands in for it, and one line says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopar.errors import InputError
from costdb import stand_in
from costdb.database import Database, default_path
from tests.costdb.test_database import HERE, operator
from tests.costdb.test_refusals import largest_file


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(stand_in, "_STAND_IN", [])
    yield


def known() -> set[str]:
    with Database.open() as database:
        return set(database.operators(HERE))


def written(name: str) -> None:
    with Database.open() as database:
        database.write_operators(HERE, [operator(name)])


def corrupt() -> None:
    default_path().parent.mkdir()
    default_path().write_text("no database" * 100)


def corrupt_inside() -> None:
    written("relu")
    text = bytearray(default_path().read_bytes())
    text[4096:] = b"\x07" * (len(text) - 4096)
    default_path().write_bytes(text)


def folder_in_its_place() -> None:
    default_path().mkdir(parents=True)


@pytest.mark.parametrize("spoil", [corrupt, corrupt_inside, folder_in_its_place])
def test_one_that_cannot_be_read_is_done_without(
    spoil: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil()
    written("add")
    assert known() == {"add"} and known() == {"add"}
    told = capsys.readouterr().err
    assert told.count("autopar: cost database") == 1 and str(default_path()) in told
    assert "a cache of measurements" in told and "--costdb" in told
    with pytest.raises(InputError):
        written_to_named()


def written_to_named() -> None:
    with Database.open(default_path()) as database:
        database.write_operators(HERE, [operator("add")])
        database.operators(HERE)


def test_one_that_cannot_be_written_keeps_telling_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    written("relu")
    with largest_file(default_path().stat().st_size), Database.open() as database:
        database.write_operators(HERE, [operator(f"relu {number}") for number in range(2_000)])
        assert len(database.operators(HERE)) == 2_001
    assert len(known()) == 2_001 and "make room" in capsys.readouterr().err


def test_a_home_that_is_none_is_done_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "~nobody/data")
    written("add")
    assert known() == {"add"} and "HOME or XDG_DATA_HOME" in capsys.readouterr().err


def test_only_rank_0_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt()
    monkeypatch.setenv("RANK", "1")
    assert known() == set() and capsys.readouterr().err == ""
