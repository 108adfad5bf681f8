"""Copies of the tree, in which slips are made, and pytest on one of them.

The copy is first on the path of every process, so that ranks import the slip too. Each pytest has a process
group of its own; ranks may have sessions of their own, but all of them carry the copy's path in their
environment, and what still lives when a run is over is ended by that mark.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.slips import Slip

LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "*.sqlite", "node_modules"
)
PAUSE = 0.01  # seconds, until what was ended is looked for again
FAILED = "AUTOPAR_FAILED"  # the variable with the file that gets the ids of failed tests


@dataclass(frozen=True, slots=True)
class Ran:
    """How a pytest ended: its exit code, None after the time limit; and the tests that failed."""

    code: int | None
    failed: tuple[str, ...]
    output: str


class Copy:
    """A copy of the tree at `root`, which lasts as long as `copied`; once `closed`, nothing starts in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.closed = False

    @contextmanager
    def slipped(self, slip: Slip) -> Iterator[None]:
        """The slip is made, and undone."""
        path = self.root / slip.file
        source = path.read_bytes()
        try:
            self._write(path, slip.applied(source))
            yield
        finally:
            if self.root.exists():
                self._write(path, source)

    @staticmethod
    def _write(path: Path, source: bytes) -> None:
        path.write_bytes(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # their time stamps are too coarse to tell two slips apart

    def pytest(
        self, words: Sequence[str], *, seconds: float | None, variables: Mapping[str, str] | None = None
    ) -> Ran:
        """Run it with `words`, for at most `seconds`; nothing of it lives on."""
        if self.closed:
            raise InterruptedError(f"{self.root} is closed")
        noted = self.root / ".failed"
        noted.unlink(missing_ok=True)
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # examples that failed for another slip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *words]
        environment = os.environ | {"PYTHONPATH": str(self.root), FAILED: str(noted)} | dict(variables or {})
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._end(process)
            output.seek(0)
            text = output.read().decode(errors="replace")
        return Ran(code, tuple(noted.read_text().splitlines()) if noted.exists() else (), text)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.end_all()

    def end_all(self) -> None:
        """End every process that was started from this copy, and wait for it."""
        while pids := self.alive():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(PAUSE)

    def alive(self) -> list[int]:
        mark = f"PYTHONPATH={self.root}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it ended meanwhile, or is not ours
                if mark in path.read_bytes() + b"\0":
                    found.append(int(path.parent.name))
        return found


@contextmanager
def copied(root: Path) -> Iterator[Copy]:
    """A copy of the working tree, tests included, removed at the end with all that runs in it."""
    with tempfile.TemporaryDirectory(prefix="autopar-mutants-", ignore_cleanup_errors=True) as name:
        copy = Copy(Path(name) / "tree")
        shutil.copytree(root, copy.root, ignore=LEFT_OUT)
        try:
            yield copy
        finally:
            copy.end_all()
