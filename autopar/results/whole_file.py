"""Files that are written whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from autopar.errors import InputError


def write_whole(path: Path, text: str, *, where: str) -> None:
    """Write `text` to `path`, replacing the file at once.

    Raises InputError for `where`, leaving what was there, if the file can't be written.
    """
    draft = path.parent / f"{path.name}.part"
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except (OSError, ValueError) as cause:  # a ValueError of a name that no file can have
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        raise InputError(
            where=where,
            found=getattr(cause, "strerror", None) or str(cause),
            wanted="a file that can be written",
            remedy="name another path",
        ) from cause
