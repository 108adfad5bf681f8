"""Measured device files: what one device was measured to do, as text, with its provenance.

A file holds every row of one setting and says who measured what, how, and when, so that a plan
for the device can be made, and its numbers judged, on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from autopar.core.user_text import is_file, parse_json, read_text
from autopar.errors import InputError, show_value
from autopar.results.files.whole_file import write_whole
from costdb.columns import TABLES, check_row
from costdb.database import SCHEMA_VERSION, Database
from costdb.measurement import Measurement
from costdb.setting import Setting

FORMAT = "autopar measured device"
WANTED = f"a measured device file, version {SCHEMA_VERSION}"
MOST_THREADS = 1 << 20
FOLDER = Path(__file__).with_name("devices")


@cache
def operators_of(kind: str) -> Mapping[str, Measurement]:
    """What the device file of a kind of GPU ("h100") says of operators, by key; nothing if there is none."""
    path = FOLDER / f"{kind}.json"
    if not is_file(path):
        return {}
    setting, database = load(path)
    with closing(database):
        return database.operators(setting)


def export(database: Database, setting: Setting, path: Path, *, provenance: str) -> None:
    """Write the rows of `setting` to `path`, replacing the file at once."""
    key = asdict(setting)
    tables = {
        name: [
            {column: value for column, value in row.items() if column not in key}
            for row in database.select(name, setting)
        ]
        for name in TABLES
    }
    if not any(tables.values()):
        raise InputError(
            where=f"cost database {database.path}",
            found="no measurement of this device",
            wanted=str(setting),
            remedy="profile first",
        )
    content = {"format": FORMAT, "version": SCHEMA_VERSION, "provenance": provenance, "setting": key}
    text = json.dumps(content | dict.fromkeys(tables), indent=1, allow_nan=False)
    for name, rows in tables.items():  # a row on a line
        lines = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in rows)
        text = text.replace(f'"{name}": null', f'"{name}": [\n{lines}\n ]' if rows else f'"{name}": []')
    text += "\n"
    write_whole(path, text, where=f"device file {path}")


def load(path: Path) -> tuple[Setting, Database]:
    """The setting of a device file, and its rows as a database in memory.

    Raises InputError for another file, and for one whose rows can't have been measured.
    """
    content = _content(path)
    setting = _setting(path, content["setting"])
    database = Database.in_memory(path)
    try:
        for table in TABLES:
            for row in content[table]:
                check_row(table, row, leave_out=content["setting"])
            database.insert(table, setting, content[table])
        database.check_rows(setting)
    except InputError as cause:
        database.close()
        raise _unusable(path, f"{cause.where}: {cause.found}", cause.wanted) from cause
    return setting, database


def _content(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_text(path))
    except ValueError as cause:
        raise _unusable(path, str(cause)) from cause
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _unusable(path, "another kind of file")
    if content.get("version") != SCHEMA_VERSION:
        raise _unusable(path, f"version {show_value(content.get('version'))}")
    missing = {"provenance", "setting", *TABLES} - content.keys()
    if missing:
        raise _unusable(path, "no " + ", no ".join(sorted(missing)))
    lists = [name for name in TABLES if not isinstance(content[name], list)]
    if lists:
        raise _unusable(path, f"{lists[0]} = {show_value(content[lists[0]])}", "a list of rows")
    return content


def _setting(path: Path, said: Any) -> Setting:
    """The setting that a file says."""
    if isinstance(said, dict) and said.keys() == set(Setting.__slots__):
        texts = isinstance(said["fingerprint"], str) and isinstance(said["torch_version"], str)
        if texts and type(said["threads"]) is int and 0 < said["threads"] < MOST_THREADS:
            return Setting(**said)
    wanted = "a fingerprint, a torch_version, and a whole number of threads"
    raise _unusable(path, f"setting = {show_value(said)}", wanted)


def _unusable(path: Path, found: str, wanted: str = WANTED) -> InputError:
    return InputError(
        where=f"device file {path}",
        found=found,
        wanted=wanted,
        remedy="export it again from a cost database",
    )
