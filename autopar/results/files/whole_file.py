"""Files that are written whole or not at all.

text ─ draft of a new name, synced ─ rename ─ path        a crash leaves the old file, or the new one
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from autopar.errors import InputError

_MODE = 0o666  # of a new file, as far as the process's mask allows


def write_whole(path: Path, text: str, *, where: str) -> None:
    """Write `text` to `path`, replacing the file at once.

    Raises InputError for `where`, leaving what was there, if the file can't be written.
    """
    try:
        _replace(path, text)
    except (OSError, ValueError) as cause:  # a ValueError of a name that no file can have
        raise InputError(
            where=where,
            found=getattr(cause, "strerror", None) or str(cause),
            wanted="a file that can be written",
            remedy="name another path",
        ) from cause


def _replace(path: Path, text: str) -> None:
    number, draft = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(number, _mode_of(path))
            file.flush()
            os.fsync(number)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    with suppress(OSError):  # file systems that can't
        sync_folder(path.parent)


def _mode_of(path: Path) -> int:
    """The permissions of the file that is there, those of a new one else."""
    with suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return _MODE & ~mask


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Wait until what was written to a file is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
