"""A database that can't be used says what to do, and only where it is beyond repair to delete it."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autopar.errors import InputError
from costdb import rows
from costdb.database import Database
from tests.costdb.test_database import DEVICE, HERE, operator


def refused(path: Path) -> InputError:
    """The error of a database that is opened, read and written."""
    with pytest.raises(InputError) as caught, Database.open(path) as database:
        database.operators(HERE)
        database.write_operators(HERE, [operator(f"relu {number}") for number in range(2_000)])
    return caught.value


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """A quota: no file of this process may grow beyond it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_one_that_is_locked_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costdb.database.BUSY_SECONDS", 0.05)
    path = tmp_path / "costs.sqlite"
    with Database.open(path) as other, other._transaction():
        error = refused(path)
    assert "locked" in error.found
    assert "wait until" in error.remedy and "--costdb" in error.remedy and "delete" not in error.remedy


def test_one_that_a_quota_ends_wants_room_and_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    with Database.open(path) as database:
        database.write_operators(HERE, [operator()])
    with largest_file(path.stat().st_size + 4096):
        error = refused(path)
    assert "room" in error.wanted and "make room" in error.remedy and "delete" not in error.remedy
    with Database.open(path) as database:
        assert set(database.operators(HERE)) == {"relu"}
        database.write_operators(HERE, [operator("add")])


def test_a_new_one_without_room_is_refused_alike(tmp_path: Path) -> None:
    with largest_file(1024):
        error = refused(tmp_path / "costs.sqlite")
    assert "make room" in error.remedy and "delete" not in error.remedy


def test_one_that_can_only_be_read_is_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    with Database.open(path) as database:
        database.write_operators(HERE, [operator()])
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    with Database(connection, path) as database:
        assert set(database.operators(HERE)) == {"relu"}
        with pytest.raises(InputError, match="readonly") as caught:
            database.write_operators(HERE, [operator("add")])
    assert "make them writable" in caught.value.remedy and "delete" not in caught.value.remedy


@pytest.mark.parametrize("path", ["/proc/costs.sqlite", "/proc/none/costs.sqlite", "/proc", "a\x00b"])
def test_a_place_where_no_file_can_be_is_refused(path: str) -> None:
    error = refused(Path(path))
    assert "--costdb" in error.remedy and "delete" not in error.remedy


def test_only_one_that_is_malformed_may_be_deleted(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    with Database.open(path) as database:
        database.write_operators(HERE, [operator(f"relu {number}") for number in range(100)])
    data = path.read_bytes()
    path.write_bytes(data[:8192] + b"\xff" * (len(data) - 8192))
    assert "delete this one" in refused(path).remedy
    path.write_text("notes that their owner wants to keep\n" * 100)
    assert "delete" not in refused(path).remedy


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("DROP TABLE operators", "operators"),
        ("ALTER TABLE devices ADD COLUMN more TEXT", "devices"),
        ("DROP TABLE operators; CREATE VIEW operators AS SELECT 1", "operators"),
        ("CREATE TRIGGER t BEFORE INSERT ON devices BEGIN DELETE FROM operators; END", "trigger 't'"),
    ],
)
def test_tables_of_another_hand_are_named(change: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    Database.open(path).close()
    connection = sqlite3.connect(path)
    connection.executescript(change)
    connection.close()
    assert refused(path).found == f"other tables than it was made with: {found}"


@pytest.mark.parametrize(
    ("table", "column", "cell"),
    [
        ("operators", "saved_operands", "'[null]'"),
        ("operators", "saved_results", "'[01]'"),
        ("operators", "saved_results", "replace(hex(zeroblob(50000)), '0', '[')"),
        ("operators", "runs", "'many'"),
        ("operators", "spread", "x'00'"),
        ("operators", "measured_at", "x'ff'"),
        ("operators", "scratch_bytes", "1.5"),
    ],
)
def test_a_cell_of_another_hand_is_named(table: str, column: str, cell: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    with Database.open(path) as database:
        database.write_operators(HERE, [operator()])
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute(f"UPDATE {table} SET {column} = {cell}")
    connection.commit()
    connection.close()
    error = refused(path)
    assert "relu" in error.where and f"{column} = " in error.found


@pytest.mark.parametrize("flops", ["{}", "[]", "null"])
def test_a_device_without_rates_is_refused(flops: str) -> None:
    with pytest.raises(InputError, match="flops = "):
        rows.device({**rows.setting_row(HERE), **rows.device_row(DEVICE), "flops": flops})
