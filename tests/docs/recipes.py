"""The recipes of CONTRIBUTING.md: what each changes, and the commands that try it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import BLOCK, ROOT

FILE = re.compile(r"^(?:---|\+\+\+) (.+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Recipe:
    """`diff` is a unified diff without line numbers."""

    name: str
    diff: str
    commands: tuple[tuple[str, ...], ...]

    @property
    def added(self) -> list[str]:
        """Lines that it adds, but for docstrings of one line."""
        lines = [line[1:] for _, hunk in self.hunks() for line in hunk if line.startswith("+")]
        return [line for line in lines if not line.strip().startswith('"""')]

    def hunks(self) -> Iterator[tuple[str, list[str]]]:
        """Each file that it changes, with the lines around one place."""
        _, *parts = FILE.split(self.diff)
        for path, text in zip(parts[::2], parts[1::2], strict=True):
            for hunk in text.split("@@\n"):
                yield path, hunk.splitlines()

    def apply(self, root: Path) -> None:
        """Change the files under `root`; a place that isn't there exactly once is an error."""
        for path, hunk in self.hunks():
            before = [line[1:] for line in hunk if not line.startswith("+")]
            after = [line[1:] for line in hunk if not line.startswith("-")]
            file = root / path
            lines = file.read_text().splitlines() if before else []
            assert before or not file.exists(), f"{path} is there already"
            starts = [at for at in range(len(lines)) if lines[at : at + len(before)] == before]
            assert len(starts) == 1 or not before, f"{path} has {len(starts)} times: {before}"
            at = starts[0] if before else 0
            file.write_text("\n".join([*lines[:at], *after, *lines[at + len(before) :], ""]))


def recipes() -> list[Recipe]:
    """Those of CONTRIBUTING.md, in their order."""
    sections = re.split(r"^## (Add .+)\n", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)[1:]
    return [_recipe(name, text) for name, text in zip(sections[::2], sections[1::2], strict=True)]


def _recipe(name: str, text: str) -> Recipe:
    blocks = BLOCK.findall(text)
    (diff,) = [content for language, content in blocks if language == "diff"]
    lines = [line for language, content in blocks if not language for line in content.splitlines()]
    return Recipe(name, diff, tuple(tuple(shlex.split(line)) for line in lines))
