"""The database of measurements: one SQLite file, by default in the user's data folder.

Writes are transactions that take the write lock first and wait for other processes. The journal is
SQLite's default one: write-ahead logging doesn't work on network file systems, where the home
folders of clusters often lie. A file's PRAGMA application_id says that it is autopar's, its
user_version which schema it holds.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

from autopar.core.costs import DeviceModel
from autopar.errors import InputError
from costdb import rows, stand_in
from costdb.columns import SCHEMA, TABLES, wrong_tables
from costdb.measurement import CollectiveMeasurement, Measurement
from costdb.rows import Row
from costdb.setting import Setting

APPLICATION_ID = 0x61706172  # "apar"
SCHEMA_VERSION = 1  # raise it with every change of schema.sql
BUSY_SECONDS = 30.0  # how long a write waits for another process
STAND_IN = Path("memory")  # where the default one can't be used
CHECK_SECONDS = 3.0  # how long it does where only that is asked

Decoded = TypeVar("Decoded")


def default_path() -> Path:
    """`autopar/costs.sqlite` in the user's data folder."""
    data = os.environ.get("XDG_DATA_HOME")
    if not data:
        data = os.path.expanduser("~/.local/share")
    if str(data).startswith("~"):
        raise _unusable(Path(data), "no home folder", Refusal("HOME or XDG_DATA_HOME", OTHER))
    return Path(data) / "autopar" / "costs.sqlite"


class Database:
    """An open database. Use as a context manager, or call `close`."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, is_default: bool = False) -> None:
        self._connection, self.path, self._is_default = connection, path, is_default

    @staticmethod
    def open(path: Path | str | None = None) -> Database:
        """Open the database at `path`, created on demand; the default one or, if that can't be used, what
        stands in for it.

        Raises InputError if the named file is no database, another program's, or of another version.
        """
        if path is not None:
            return Database._open(Path(path))
        if (known := stand_in.stand_in()) is not None:
            return Database(known, STAND_IN)
        try:
            return Database._open(default_path(), is_default=True)
        except InputError as cause:
            return Database(_prepared(stand_in.begin(cause)), STAND_IN)

    @staticmethod
    def _open(place: Path, *, is_default: bool = False) -> Database:
        with _refused(place):
            if place.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder")
            place.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(place, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                _prepare(connection, place)
            except BaseException:
                connection.close()
                raise
        return Database(connection, place, is_default=is_default)

    @staticmethod
    def in_memory(name: Path) -> Database:
        """An empty database that is never written to disk; `name` stands in its errors."""
        connection = sqlite3.connect(":memory:", isolation_level=None)
        _prepare(connection, name)
        return Database(connection, name)

    def close(self) -> None:
        if self._connection is not stand_in.stand_in():
            self._connection.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_writable(self) -> None:
        """Raise InputError unless rows could be written within `CHECK_SECONDS`."""
        with _refused(self.path):
            self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * CHECK_SECONDS)}")
            with self._transaction():
                self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def write_operators(self, setting: Setting, measurements: Iterable[Measurement]) -> None:
        """Store all or none; a newer measurement replaces an older one of the same key."""
        self.insert("operators", setting, [rows.operator_row(each) for each in measurements])

    def write_collectives(self, setting: Setting, measurements: Iterable[CollectiveMeasurement]) -> None:
        """Store all or none, newer ones in place of older ones."""
        self.insert("collectives", setting, [rows.collective_row(each) for each in measurements])

    def write_device(self, setting: Setting, device: DeviceModel) -> None:
        """Store the calibrated roofline of a device."""
        self.insert("devices", setting, [rows.device_row(device)])

    def operators(self, setting: Setting) -> dict[str, Measurement]:
        """Every measured operator call of a setting, by key."""
        found = self._decode(rows.operator, self.select("operators", setting))
        return {measurement.key: measurement for measurement in found}

    def operator(self, setting: Setting, key: str) -> Measurement | None:
        """The measurement of one operator call, if there is one."""
        found = self._decode(rows.operator, self.select("operators", setting, key=key))
        return found[0] if found else None

    def collectives(self, setting: Setting) -> list[CollectiveMeasurement]:
        """Every measured collective of a setting."""
        return self._decode(rows.collective, self.select("collectives", setting))

    def device(self, setting: Setting) -> DeviceModel | None:
        """The calibrated roofline, if there is one."""
        found = self._decode(rows.device, self.select("devices", setting))
        return found[0] if found else None

    def settings(self) -> list[Setting]:
        """Every setting that has rows, sorted."""
        query = " UNION ".join(f"SELECT {', '.join(Setting.__slots__)} FROM {name}" for name in TABLES)
        with _refused(self.path):
            found = list(self._connection.execute(query))
        return sorted(
            self._decode(rows.setting, [dict(zip(Setting.__slots__, row, strict=True)) for row in found])
        )

    def check_rows(self, setting: Setting) -> None:
        """Raise InputError for the first row of a setting that can't have been measured."""
        self.operators(setting)
        self.collectives(setting)
        self.device(setting)

    def insert(self, table: str, setting: Setting, values: list[Row]) -> None:
        """Insert or replace rows of one table, all or none."""
        if not values:
            return
        try:
            self._insert(table, setting, values)
        except InputError as cause:
            self._go_on_without(cause, self._connection)
            self._insert(table, setting, values)

    def _insert(self, table: str, setting: Setting, values: list[Row]) -> None:
        complete = [rows.setting_row(setting) | row for row in values]
        columns = ", ".join(complete[0])
        marks = ", ".join(f":{column}" for column in complete[0])
        with _refused(self.path), self._transaction():
            self._connection.executemany(
                f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", complete
            )

    def select(self, table: str, setting: Setting, **where: object) -> list[Row]:
        """The rows of one table for a setting, and further conditions, as stored."""
        try:
            return self._select(table, setting, **where)
        except InputError as cause:
            self._go_on_without(cause)
            return []

    def _select(self, table: str, setting: Setting, **where: object) -> list[Row]:
        conditions = rows.setting_row(setting) | where
        clause = " AND ".join(f"{column} = :{column}" for column in conditions)
        with _refused(self.path):
            cursor = self._connection.execute(f"SELECT * FROM {table} WHERE {clause}", conditions)
            columns = [column[0] for column in cursor.description]
            return [dict(zip(columns, row, strict=True)) for row in cursor]

    def _decode(self, decode: Callable[[Row], Decoded], found: list[Row]) -> list[Decoded]:
        """`found` as measurements; a bad number names this file."""
        try:
            return [decode(row) for row in found]
        except InputError as cause:
            error = InputError(
                where=f"cost database {self.path}: {cause.where}",
                found=cause.found,
                wanted=cause.wanted,
                remedy=OTHER_OR_NEW,
            )
            error.__cause__ = cause
            self._go_on_without(error)
            return []

    def _go_on_without(self, error: InputError, readable: sqlite3.Connection | None = None) -> None:
        """Raise the error of a database that was named; memory stands in for the default one from now on."""
        if not self._is_default:
            raise error
        refused, self._connection = self._connection, stand_in.begin(error, readable)
        refused.close()
        _prepared(self._connection)
        self.path, self._is_default = STAND_IN, False

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Takes the write lock, waiting for it, before the first row."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # of some failures SQLite has made an end itself
                self._connection.execute("ROLLBACK")
            raise


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """A connection to memory, with the tables."""
    _prepare(connection, STAND_IN)
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables in an empty file; refuse a file that isn't ours."""
    # One statement sees one moment of the file, also while another process creates the tables.
    tables, program, version = connection.execute(
        "SELECT (SELECT count(*) FROM sqlite_master), application_id, user_version"
        " FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if not tables and not program and not version:
        # Idempotent, so two processes may both find the file empty.
        connection.executescript(
            f"BEGIN IMMEDIATE; {SCHEMA.read_text()}; PRAGMA application_id = {APPLICATION_ID};"
            f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    elif program != APPLICATION_ID:
        raise _unusable(path, "another program's database", Refusal("autopar's cost database", OTHER))
    elif version != SCHEMA_VERSION:
        raise _unusable(path, f"version {version}", Refusal(f"version {SCHEMA_VERSION}", OTHER_OR_NEW))
    elif wrong := wrong_tables(connection):
        found = f"other tables than it was made with: {', '.join(wrong)}"
        raise _unusable(path, found, Refusal("those of schema.sql", OTHER_OR_NEW))


class Refusal(NamedTuple):
    """What is wanted of a file that SQLite, or the file system, refuses, and the remedy."""

    wanted: str
    remedy: str


DATABASE = f"a cost database, version {SCHEMA_VERSION}"
OTHER = "choose another file with --costdb"
OTHER_OR_NEW = f"{OTHER}, or delete this one and profile again"
BUSY = Refusal(
    "one that other processes leave free in time",
    f"wait until the process that uses it is done, or {OTHER}",
)
CLOSED = Refusal("a file and a folder that can be written", f"make them writable, or {OTHER}")
FULL = Refusal("room on the disk, within your quota", f"make room there, or {OTHER} on another disk")
ROW = Refusal("numbers that the schema allows", "measure again, and report this if it happens again")
REFUSALS: Mapping[int, Refusal] = {
    sqlite3.SQLITE_BUSY: BUSY,
    sqlite3.SQLITE_LOCKED: BUSY,
    sqlite3.SQLITE_PROTOCOL: BUSY,
    sqlite3.SQLITE_READONLY: CLOSED,
    sqlite3.SQLITE_CANTOPEN: CLOSED,
    sqlite3.SQLITE_PERM: CLOSED,
    sqlite3.SQLITE_AUTH: CLOSED,
    sqlite3.SQLITE_FULL: FULL,
    sqlite3.SQLITE_IOERR: FULL,
    sqlite3.SQLITE_CONSTRAINT: ROW,
    sqlite3.SQLITE_CORRUPT: Refusal(DATABASE, OTHER_OR_NEW),
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn SQLite's and the file system's refusals into errors that name the file."""
    try:
        yield
    except sqlite3.Error as cause:
        code = getattr(cause, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR
        raise _unusable(path, str(cause), REFUSALS.get(code & 0xFF, Refusal(DATABASE, OTHER))) from cause
    except OSError as cause:
        refusal = FULL if cause.errno in NO_ROOM else CLOSED
        raise _unusable(path, cause.strerror or str(cause), refusal) from cause
    except MemoryError as cause:
        raise _unusable(path, "rows that memory can't hold", Refusal(DATABASE, OTHER)) from cause
    except (ValueError, OverflowError) as cause:  # of a name that no file can have, of a number of 65 bits
        raise _unusable(path, str(cause), Refusal(DATABASE, OTHER)) from cause


def _unusable(path: Path, found: str, refusal: Refusal) -> InputError:
    return InputError(
        where=f"cost database {path}", found=found, wanted=refusal.wanted, remedy=refusal.remedy
    )
