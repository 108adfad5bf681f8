"""What stands in for the default database where that can't be used: the same tables in this process's memory.

The database is a cache of measurements: without it a command measures anew, or estimates. One that is named
by --costdb is meant, and its refusals are raised.
"""

from __future__ import annotations

import os
import sqlite3
import sys

from autopar.errors import InputError

_STAND_IN: list[sqlite3.Connection] = []  # at most one, for the rest of the process: measurements stay known


def stand_in() -> sqlite3.Connection | None:
    """The connection that stands in, if the default database has failed before."""
    return _STAND_IN[0] if _STAND_IN else None


def begin(refused: InputError, readable: sqlite3.Connection | None = None) -> sqlite3.Connection:
    """A connection to memory, with what the `readable` database holds; says once why, on rank 0."""
    connection = (readable and _copied(readable)) or _memory()
    _STAND_IN[:] = [connection]
    if os.environ.get("RANK", "0") == "0":
        print(
            f"autopar: {refused.where}: found {refused.found}, wanted {refused.wanted}; this goes on without "
            f"it, which is a cache of measurements. To have it again, {refused.remedy}",
            file=sys.stderr,
        )
    return connection


def _copied(readable: sqlite3.Connection) -> sqlite3.Connection | None:
    """What a database holds, in memory; None where not all of that can be read."""
    connection = _memory()
    try:
        readable.backup(connection)
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error:
        return None
    return connection if verdict == "ok" else None


def _memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
