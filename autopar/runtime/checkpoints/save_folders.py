"""Folders of saves: each counts once it is whole, and the newest good one is found by itself.

    runs/a/.save-000007.part/    files, synced  ->  save.json, synced  --rename-->  runs/a/save-000007/

A crash leaves a `.part` folder, which the next save takes away; what was saved before stays as it is.
Numbers only grow, so that no save stands in the place of another.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.core.version import VERSION
from autopar.errors import InputError
from autopar.results.files.whole_file import sync_file, sync_folder, write_whole

SAVE_FORM = 1  # of the files in a save; a higher one is a newer autopar's
MANIFEST = "save.json"
_CHUNK_BYTES = 1 << 22  # that a checksum reads at a time
_NAME = re.compile(r"save-(\d{6,})")
_PART = re.compile(r"\.save-\d{6,}\.part")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a save: `model` has each tensor's form, `files` bytes and checksum of each file."""

    step: int | None
    samples: int | None
    world: int
    model: Mapping[str, str]
    optimizers: tuple[str, ...]
    parts: tuple[str, ...]
    files: Mapping[str, tuple[int, int]]
    torch: str
    autopar: str = VERSION
    form: int = SAVE_FORM


@dataclass(frozen=True, slots=True)
class GoodSave:
    """A whole save, and what is wrong with newer folders."""

    path: Path
    manifest: Manifest
    left_out: Mapping[str, str]


# -- writing ------------------------------------------------------------------------------------


def begin(folder: Path) -> Path:
    """Make the draft of the next save, and take away those that crashes have left."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        if _PART.fullmatch(left.name):
            shutil.rmtree(left)
    number = 1 + max((number for number, _ in _numbered(folder)), default=0)
    draft = folder / f".save-{number:06d}.part"
    draft.mkdir()
    return draft


def probe(folder: Path, where: str) -> Path:
    """Write a file to a folder that saves are to go to; its path. Raises InputError for a save itself."""
    if _NAME.fullmatch(folder.name) or (folder / MANIFEST).is_file():
        raise InputError(
            where=where,
            found="a single save",
            wanted="the folder that saves go to",
            remedy=f"pass {folder.parent}, or another folder after autopar.load of this one",
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".probe-{uuid.uuid4().hex}"
    path.write_bytes(b"0")
    return path


def publish(draft: Path, manifest: Manifest) -> Path:
    """Give the draft its name, once all of it is on the disk."""
    for name in manifest.files:
        sync_file(draft / name)
    write_whole(draft / MANIFEST, json.dumps(asdict(manifest)), where=f"autopar.save to {draft.parent}")
    sync_folder(draft)
    path = published_name(draft)
    draft.rename(path)
    with suppress(OSError):  # file systems that can't
        sync_folder(path.parent)
    return path


def published_name(draft: Path) -> Path:
    """The name that a draft will have."""
    return draft.with_name(draft.name.removeprefix(".").removesuffix(".part"))


def drop_old(folder: Path, keep: int) -> None:
    """Remove good saves beyond the last `keep`; each loses its name before its files."""
    good = [path for _, path in _numbered(folder) if isinstance(examine(path), Manifest)]
    for path in good[keep:]:
        dropped = path.with_name(f".{path.name}.part")
        path.rename(dropped)
        shutil.rmtree(dropped)


def listed(draft: Path, pattern: str = "*") -> dict[str, tuple[int, int]]:
    """Bytes and checksum of each file of a folder."""
    files = (path for path in sorted(draft.glob(pattern)) if path.is_file())
    return {path.name: (path.stat().st_size, checksum_of(path)) for path in files}


def checksum_of(path: Path) -> int:
    """The CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


# -- finding ------------------------------------------------------------------------------------


def find(folder: Path, spoiled: Mapping[str, str]) -> GoodSave | None:
    """The save at `folder`, or the newest good one in it; None where there is nothing.

    Those that are `spoiled` are known not to be good, by their names. Raises InputError for a save that isn't
    good, and for a folder that has none.
    """
    if _NAME.fullmatch(folder.name) or (folder / MANIFEST).is_file():
        return _asked(folder, spoiled)
    faults: dict[str, str] = {}
    for _, path in _numbered(folder):
        examined = spoiled.get(path.name) or examine(path)
        if isinstance(examined, Manifest):
            return GoodSave(path, examined, faults)
        faults[path.name] = examined
    if not faults:
        return None
    name, fault = next(iter(faults.items()))
    raise InputError(
        where=f"autopar.load of {folder}",
        found=f"{name}, {fault}" + (f", and {len(faults) - 1} more" if len(faults) > 1 else ""),
        wanted="a whole save of autopar's",
        remedy="pass the folder of another run",
    )


def _asked(path: Path, spoiled: Mapping[str, str]) -> GoodSave:
    """The save at `path`, which the user has named."""
    examined = spoiled.get(path.name) or examine(path)
    if isinstance(examined, Manifest):
        return GoodSave(path, examined, {})
    name = _NAME.fullmatch(path.name)
    older = [other for number, other in _numbered(path.parent) if name and number < int(name[1])]
    before = next((other for other in older if isinstance(examine(other), Manifest)), None)
    raise InputError(
        where=f"autopar.load of {path}",
        found=f"a folder that is {examined}",
        wanted="a whole save of autopar's",
        remedy="pass the folder of another run" if before is None else f"pass {before}, the one before",
    )


def examine(path: Path) -> Manifest | str:
    """The manifest of a save, or what is wrong with it."""
    try:
        told = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"foreign: it has no {MANIFEST}" if path.is_dir() else "not there"
    except (OSError, ValueError) as error:
        return f"torn: {MANIFEST} can't be read ({cut(error)})"
    form = told.get("form") if isinstance(told, dict) else None
    if not isinstance(form, int):
        return f"foreign: its {MANIFEST} isn't autopar's"
    if form > SAVE_FORM:
        return f"newer: written by autopar {told.get('autopar')} in form {form}, this one reads {SAVE_FORM}"
    try:
        manifest = _manifest(told)
    except (TypeError, AttributeError):
        return f"torn: {MANIFEST} lacks entries"
    return _torn(path, manifest) or manifest


def _manifest(told: Mapping[str, Any]) -> Manifest:
    lists = {name: tuple(told[name]) for name in ("optimizers", "parts") if name in told}
    manifest = Manifest(**{**told, **lists})
    if not all(len(entry) == len(("bytes", "checksum")) for entry in manifest.files.values()):
        raise TypeError
    return manifest


def _torn(path: Path, manifest: Manifest) -> str:
    """A file that isn't as it was written; empty where all are."""
    for name, (size, _) in manifest.files.items():
        try:
            here = (path / name).stat().st_size
        except OSError:
            return f"torn: {name} is missing"
        if here != size:
            return f"torn: {name} has {here} bytes of {size}"
    return ""


def spoiled_file(save: GoodSave, rank: int, size: int) -> str:
    """A file that has other bytes than were written, of those that are this rank's to look at, or nothing."""
    for name in sorted(save.manifest.files)[rank::size]:
        try:
            if checksum_of(save.path / name) != save.manifest.files[name][1]:
                return f"torn: {name} has other bytes than were written"
        except OSError as error:
            return f"torn: {name} can't be read on rank {rank} ({cut(error)})"
    return ""


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """The saves of a folder by their numbers, the newest first."""
    names = folder.iterdir() if folder.is_dir() else ()
    matches = ((_NAME.fullmatch(path.name), path) for path in names)
    yield from sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def cut(error: BaseException) -> str:
    """An error's own words, in one line."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(words).split())[:120]
