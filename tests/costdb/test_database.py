"""The database: what is written comes back, whole; what is bad is refused by name."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import re
import sqlite3
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.core.costs import Collective, DeviceModel, SavedByCall
from autopar.errors import InputError
from costdb.database import SCHEMA_VERSION, Database
from costdb.device_file import export, load
from costdb.measurement import CollectiveMeasurement, Measurement
from costdb.setting import Setting, fingerprint

HERE = Setting("a device", "2.13.0", 2)
TABLES_OF = {
    1: "76273c89660e7710"
}  # digests of each version's statements; versions that were out keep theirs


def operator(key: str = "relu", forward_seconds: float = 1.0) -> Measurement:
    return Measurement(
        key=key,
        forward_seconds=forward_seconds,
        backward_seconds=2.0,
        saved=SavedByCall((0, 2), (1,), 12),
        saved_bytes=100,
        scratch_bytes=None,
        runs=5,
        spread=0.1,
        measured_at="2026-01-02T03:04:05+00:00",
    )


def collective(seconds: float = 0.5) -> CollectiveMeasurement:
    return CollectiveMeasurement(
        kind=Collective.ALL_GATHER,
        backend="gloo",
        size=2,
        nodes=1,
        nbytes=8,
        seconds=seconds,
        runs=5,
        spread=0.1,
        measured_at="2026-01-02T03:04:05+00:00",
    )


DEVICE = DeviceModel("toy", "cpu", ((torch.float32, 2.0), (torch.float64, 1.0)), 3.0, 0.25)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    with Database.open(tmp_path / "new" / "costs.sqlite") as database:
        database.write_operators(HERE, [operator("a"), operator("b")])
        database.write_collectives(HERE, [collective()])
        database.write_device(HERE, DEVICE)
    with Database.open(tmp_path / "new" / "costs.sqlite") as database:
        assert database.operators(HERE) == {"a": operator("a"), "b": operator("b")}
        assert database.operator(HERE, "a") == operator("a")
        assert database.collectives(HERE) == [collective()]
        assert database.device(HERE) == DEVICE
        assert database.settings() == [HERE]


def one_changed(subject: Setting | CollectiveMeasurement, **values: object) -> list[Any]:
    """`subject`, and for each of `values` itself with that field alone changed."""
    return [subject, *(replace(subject, **{name: value}) for name, value in values.items())]


SETTINGS = one_changed(HERE, fingerprint="another", torch_version="2.12.0", threads=1)


def test_settings_that_differ_in_one_field_keep_rows_of_their_own(tmp_path: Path) -> None:
    assert len(SETTINGS) == 1 + len(fields(Setting))
    path, numbered = tmp_path / "toy.json", list(enumerate(SETTINGS, start=1))
    with Database.open(tmp_path / "costs.sqlite") as database:
        for number, setting in numbered:
            database.write_operators(setting, [operator(forward_seconds=number)])
            database.write_collectives(setting, [collective(number)])
            database.write_device(setting, replace(DEVICE, bandwidth=float(number)))
        assert database.settings() == sorted(SETTINGS)
        for number, setting in numbered:
            export(database, setting, path, provenance="a test")
            _, exported = load(path)
            for each in (database, exported):
                assert each.operator(setting, "relu") == operator(forward_seconds=number)
                assert each.operators(setting) == {"relu": operator(forward_seconds=number)}
                assert each.collectives(setting) == [collective(number)]
                assert each.device(setting) == replace(DEVICE, bandwidth=float(number))


def test_a_setting_that_was_never_written_has_no_rows(tmp_path: Path) -> None:
    with Database.open(tmp_path / "costs.sqlite") as database:
        database.write_operators(HERE, [operator()])
        database.write_collectives(HERE, [collective()])
        database.write_device(HERE, DEVICE)
        for other in SETTINGS[1:]:
            assert database.operator(other, "relu") is None
            assert database.operators(other) == {}
            assert database.collectives(other) == []
            assert database.device(other) is None


def test_a_setting_with_rows_of_one_kind_alone_is_named(tmp_path: Path) -> None:
    first, second, third, _ = SETTINGS
    with Database.open(tmp_path / "costs.sqlite") as database:
        database.write_operators(first, [operator()])
        database.write_collectives(second, [collective()])
        database.write_device(third, DEVICE)
        assert database.settings() == sorted([first, second, third])


def test_collectives_that_differ_in_one_field_keep_rows_of_their_own(tmp_path: Path) -> None:
    different = one_changed(
        collective(), kind=Collective.ALL_REDUCE, backend="nccl", size=4, nodes=2, nbytes=16
    )
    with Database.open(tmp_path / "costs.sqlite") as database:
        database.write_collectives(HERE, different)
        kept = database.collectives(HERE)
    assert len(kept) == len(different)
    assert set(kept) == set(different)


def test_a_newer_measurement_replaces_the_older(tmp_path: Path) -> None:
    with Database.open(tmp_path / "costs.sqlite") as database:
        database.write_operators(HERE, [operator(forward_seconds=1.0)])
        database.write_operators(HERE, [operator(forward_seconds=3.0)])
        assert [each.forward_seconds for each in database.operators(HERE).values()] == [3.0]


def test_the_default_is_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with Database.open() as database:
        assert database.path == tmp_path / "autopar" / "costs.sqlite"
    assert (tmp_path / "autopar" / "costs.sqlite").exists()


def _write_many(path: Path, name: str) -> None:
    for number in range(20):
        with Database.open(path) as database:
            database.write_operators(HERE, [operator(f"{name}{number}"), operator(f"{name}{number}'")])


def test_processes_writing_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, name)) for name in "xyz"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    with Database.open(path) as database:
        assert len(database.operators(HERE)) == 3 * 20 * 2


def test_a_failed_write_leaves_no_half(tmp_path: Path) -> None:
    with Database.open(tmp_path / "costs.sqlite") as database:
        broken = operator("b")
        object.__setattr__(broken, "forward_seconds", -1.0)
        with pytest.raises(InputError, match="CHECK constraint"):
            database.write_operators(HERE, [operator("a"), broken])
        assert database.operators(HERE) == {}


def test_every_change_of_the_tables_raises_their_version(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    Database.open(path).close()
    with sqlite3.connect(path) as connection:
        ((version,),) = connection.execute("PRAGMA user_version")
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
        tables = [(name, " ".join(re.sub(r"--.*", "", sql).split())) for name, sql in rows]
    assert version == SCHEMA_VERSION
    assert TABLES_OF[version] == hashlib.sha256(repr(tables).encode()).hexdigest()[:16]


def test_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    Database.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(InputError) as caught:
        Database.open(path)
    assert str(path) in caught.value.where
    assert caught.value.found == "version 99"
    assert caught.value.wanted == f"version {SCHEMA_VERSION}"
    assert "delete" in caught.value.remedy


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but text that its owner wants to keep\n" * 50)
    before = path.read_text()
    with pytest.raises(InputError, match="notes.txt: found file is not a database"):
        Database.open(path)
    assert path.read_text() == before


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE operators (name TEXT)")
    with pytest.raises(InputError, match="another program's database"):
        Database.open(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/costs.sqlite"):
        Database.open(tmp_path / "file" / "costs.sqlite")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_bad_costs_cannot_be_made(bad: float) -> None:
    with pytest.raises(InputError, match="relu.*forward_seconds"):
        operator(forward_seconds=bad)
    with pytest.raises(InputError, match="all_gather.*seconds"):
        collective(bad)


@pytest.mark.parametrize("bad", ["9e999", "-1", "'fast'"])
def test_bad_costs_in_the_file_are_refused_on_read(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "costs.sqlite"
    with Database.open(path) as database:
        database.write_operators(HERE, [operator()])
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute(f"UPDATE operators SET forward_seconds = {bad}")
    connection.commit()
    connection.close()
    with Database.open(path) as database, pytest.raises(InputError, match="costs.sqlite.*relu.*forward"):
        database.operators(HERE)


def test_a_device_file_holds_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    with Database.open(tmp_path / "costs.sqlite") as database:
        database.write_operators(HERE, [operator()])
        database.write_collectives(HERE, [collective()])
        database.write_device(HERE, DEVICE)
        export(database, HERE, path, provenance="a test")
    setting, read = load(path)
    with read:
        assert setting == HERE
        assert read.operators(HERE) == {"relu": operator()}
        assert read.collectives(HERE) == [collective()]
        assert read.device(HERE) == DEVICE


def test_a_device_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    for text in ("{", "{}", '{"format": "autopar measured device", "version": 99}'):
        path.write_text(text)
        with pytest.raises(InputError, match="toy.json"):
            load(path)


def test_nothing_measured_is_not_exported(tmp_path: Path) -> None:
    with (
        Database.open(tmp_path / "costs.sqlite") as database,
        pytest.raises(InputError, match="profile first"),
    ):
        export(database, HERE, tmp_path / "toy.json", provenance="a test")


def test_the_fingerprint_names_the_processor() -> None:
    assert "cores" in fingerprint("cpu")
    assert Setting.here() == Setting.here()
