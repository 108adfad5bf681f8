"""The book: plans in files, by what was asked, for the starts of a run that follow its first.

    graph, request, cluster, versions -- sha256 --> key.content.json           searched as it was asked
                                                    key.content.restart.json   ahead or in haste

A file's name has a digest of its bytes, so that a damaged one isn't run. What is taken must also be a plan
for the graph that was traced now, on the cluster that is there, with strategies that rules of this version
offer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.cluster import ClusterSpec
from autopar.core.elastic_bounds import is_restart
from autopar.core.fingerprint import fingerprint_of
from autopar.core.graph import Graph
from autopar.core.version import VERSION
from autopar.errors import InputError
from autopar.planning.graphs.fitting import read_plan
from autopar.results.files.codec import FORMAT
from autopar.results.plan.plan import Plan
from autopar.units import show_seconds
from costdb.database import default_path

BOOK = "AUTOPAR_BOOK"  # the environment variable that names the folder; empty for no book
DIGITS = 16  # of a digest, in hexadecimal
MOST_FILES = 256  # of a book, of some 200 kB each for a dozen layers; the oldest go


@dataclass(frozen=True, slots=True)
class Taken:
    """A plan of the book, or none, and what there is to say of it."""

    plan: Plan | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Book:
    """The plans in a folder; with `is_restart` also those that were made ahead or in haste."""

    folder: Path
    is_restart: bool

    def take(self, key: str, cluster: ClusterSpec, check: Callable[[Plan], None] | None) -> Taken:
        """The plan of this key for such a cluster, if its file is good and `check` doesn't refuse it."""
        notes = []
        for path in self._files(key):
            if _is_for_restarts(path) and not self.is_restart:
                continue
            try:
                plan = _read(path, cluster)
                if check is not None:
                    check(plan)
            except InputError as error:
                notes.append(f"book: a plan is left out, {error}")
                continue
            with suppress(OSError):
                path.touch()  # the oldest go
            return Taken(plan, (*notes, taken_note(plan, path)))
        return Taken(None, tuple(notes))

    def has(self, key: str) -> bool:
        """Whether there is a plan of this key."""
        return bool(self._files(key))

    def write(self, key: str, plan: Plan, *, for_restarts: bool) -> str:
        """Write a plan in place of others of its key; words for what went wrong, or none."""
        before = [path for path in self._files(key) if not for_restarts or _is_for_restarts(path)]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f".{key}.{os.getpid()}"
            plan.save(draft)
            end = ".restart.json" if for_restarts else ".json"
            path = self.folder / f"{key}.{_digest(draft.read_bytes())}{end}"
            os.replace(draft, path)
            files = sorted(self.folder.glob("*.json"), key=lambda each: each.stat().st_mtime)
            for old in {*before, *files[:-MOST_FILES]} - {path}:
                old.unlink(missing_ok=True)
        except (OSError, InputError) as error:
            return f"book: a plan isn't kept for restarts: {error}"
        return ""

    def _files(self, key: str) -> list[Path]:
        """Files of a key, those first that were searched as it was asked."""
        return sorted(self.folder.glob(f"{key}.*.json"), key=lambda path: (len(path.suffixes), path.name))


def book_of(environment: Mapping[str, str] = os.environ) -> Book | None:
    """The book that the environment names, as `autopar run --elastic` does; none without."""
    folder = environment.get(BOOK, "")
    return Book(Path(folder), is_restart(environment)) if folder else None


def default_folder() -> Path:
    """The folder of the book where nobody names one: beside the database of measurements."""
    return default_path().parent / "plans"


def key_of(graph: Graph, request: object, cluster: ClusterSpec) -> str:
    """The digest of all that decides on a plan but for measurements."""
    asked = (fingerprint_of(graph).digest, request, cluster, VERSION, torch.__version__, FORMAT)
    return _digest(repr(asked).encode())


def taken_note(plan: Plan, path: Path) -> str:
    """What the run says of a plan that wasn't searched now."""
    ahead = "made ahead or in haste" if _is_for_restarts(path) else "searched before"
    return (
        f"book: the plan for {plan.devices} is that of {path}, {ahead}, a step of "
        f"{show_seconds(plan.step_seconds)}, {plan.measured_share:.0%} of its operators' time measured and "
        f"{plan.interpolated_share:.0%} told by other sizes; nothing was searched now"
    )


def _read(path: Path, cluster: ClusterSpec) -> Plan:
    """The plan in a file that is as it was written; raises InputError for others."""
    try:
        found = _digest(path.read_bytes())
    except OSError as cause:
        raise _damaged(path, str(cause)) from cause
    if found != path.name.split(".")[1]:
        raise _damaged(path, "other bytes than were written")
    return read_plan(path, cluster)


def _is_for_restarts(path: Path) -> bool:
    return ".restart" in path.suffixes


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:DIGITS]


def _damaged(path: Path, found: str) -> InputError:
    return InputError(
        where=f"plan {path}", found=found, wanted="the plan that was written", remedy="remove the file"
    )
