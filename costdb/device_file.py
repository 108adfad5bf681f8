"""Measured device files: what one device was measured to do, as text, with its provenance.

A file holds every row of one setting and says who measured what, how, and when, so that a plan
for the device can be made, and its numbers judged, on another machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from costdb.database import SCHEMA_VERSION, TABLES, Database
from costdb.setting import Setting

FORMAT = "autopar measured device"
FOLDER = Path(__file__).with_name("devices")


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
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(content | tables, indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def load(path: Path) -> tuple[Setting, Database]:
    """The setting of a device file, and its rows as a database in memory."""
    content = _content(path)
    database = Database.in_memory(path)
    setting = Setting(**content["setting"])
    for name in TABLES:
        database.insert(name, setting, content[name])
    return setting, database


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as cause:
        raise _unusable(path, str(cause)) from cause
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _unusable(path, "another kind of file")
    if content.get("version") != SCHEMA_VERSION:
        raise _unusable(path, f"version {content.get('version')}")
    missing = {"provenance", "setting", *TABLES} - content.keys()
    if missing:
        raise _unusable(path, "no " + ", no ".join(sorted(missing)))
    return content


def _unusable(path: Path, found: str) -> InputError:
    return InputError(
        where=f"device file {path}",
        found=found,
        wanted=f"a measured device file, version {SCHEMA_VERSION}",
        remedy="export it again from a cost database",
    )
