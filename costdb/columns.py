"""What a row may hold: SQLite enforces neither types nor, in files of other hands, the schema's checks.

schema.sql ─ COLUMNS ─ check_row      of a file's rows, before they become measurements
                     ─ check_tables   of a file, when it is opened
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import SHOWN_CHARACTERS, InputError, cut_text, show_value

SCHEMA = Path(__file__).with_name("schema.sql")
KEYS = {"operators": "key", "collectives": "kind", "devices": "name"}  # what errors call a row by
TABLES = tuple(KEYS)
LONGEST = 1 << 20  # characters of a text; an operator's key has hundreds
MOST = 1 << 63  # of a whole number: SQLite's are smaller
NAMED = 3  # violations that an error names
WORDS = {"TEXT": "a text", "INTEGER": "a whole number of at least 0", "REAL": "a number"}


class Column(NamedTuple):
    """One column of a table, as SQLite describes it."""

    name: str
    type: str  # TEXT, INTEGER or REAL
    needed: bool  # NOT NULL

    def fits(self, value: Any) -> bool:
        """Whether the column may hold the value."""
        if value is None:
            return not self.needed
        match self.type:
            case "TEXT":
                return isinstance(value, str) and len(value) <= LONGEST
            case "INTEGER":
                return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST
            case _:
                return (
                    isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST**8
                )


def columns_of(connection: sqlite3.Connection, table: str) -> tuple[Column, ...]:
    """The columns of a table that is there, none for a view or where there is no such table."""
    rows = connection.execute(
        "SELECT c.name, c.type, c.[notnull] FROM sqlite_master AS t, pragma_table_info(t.name) AS c"
        " WHERE t.type = 'table' AND t.name = ?",
        (table,),
    )
    return tuple(Column(name, kind, bool(needed)) for name, kind, needed in rows)


def _columns() -> Mapping[str, tuple[Column, ...]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA.read_text())
        return {table: columns_of(connection, table) for table in TABLES}


COLUMNS = _columns()


def check_row(table: str, row: Any, *, leave_out: Collection[str] = ()) -> None:
    """Raise InputError for a row that the table can't hold; columns to `leave_out` are said elsewhere."""
    columns = {column.name: column for column in COLUMNS[table] if column.name not in leave_out}
    if not isinstance(row, dict):
        raise _wrong(table, show_value(row), f"an object of {', '.join(columns)}")
    if row.keys() != columns.keys():
        lacking, unknown = columns.keys() - row.keys(), row.keys() - columns.keys()
        odd = [f"no {name}" for name in sorted(lacking)]
        odd += [f"an unknown {cut_text(name, SHOWN_CHARACTERS)}" for name in sorted(map(str, unknown))]
        raise _wrong(_name(table, row), ", ".join(odd[:NAMED]), "the columns of schema.sql")
    bad = [name for name, column in columns.items() if not column.fits(row[name])]
    if bad:
        found = ", ".join(f"{name} = {show_value(row[name])}" for name in bad[:NAMED])
        wanted = ", ".join(f"{WORDS[columns[name].type]} as {name}" for name in bad[:NAMED])
        raise _wrong(_name(table, row), found, wanted)


def _name(table: str, row: Mapping[str, Any]) -> str:
    key = row.get(KEYS[table])
    return f"{table}, row {cut_text(key, SHOWN_CHARACTERS) if isinstance(key, str) else show_value(key)}"


def wrong_tables(connection: sqlite3.Connection) -> list[str]:
    """The tables of a file whose columns aren't the schema's, and triggers, which the schema has none of."""
    changed = [table for table in TABLES if columns_of(connection, table) != COLUMNS[table]]
    triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
    return changed + [f"trigger {show_value(name)}" for (name,) in triggers]


def _wrong(where: str, found: str, wanted: str) -> InputError:
    return InputError(where=where, found=found, wanted=wanted, remedy="measure again")
