"""The blocks of the pages: files that a reader writes, commands that one types, pieces of Python, output.

```python           a file, where the first line is its name in a comment; else a piece
```toml, ```bash    likewise a file; scripts for SLURM are named by nobody
```                 commands, or what something prints
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
PLACEHOLDER = re.compile(r"[A-Z\[]+\]?|.*\.\.\.")  # a word that a reader replaces
FILE_NAME = re.compile(r"# (\w+\.(?:py|toml))\n")
ELSEWHERE = ("make", "srun", "torchrun", "AUTOPAR_OPTIONS=")  # set up this folder, or take several nodes
HERE = ("autopar", "python")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page; `line` is where it begins."""

    page: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        named = FILE_NAME.match(self.text) if self.language in ("python", "toml") else None
        return named[1] if named else None

    @property
    def is_commands(self) -> bool:
        lines = self.text.splitlines()
        return not self.language and bool(lines) and lines[0].startswith((*HERE, *ELSEWHERE))

    @property
    def commands(self) -> list[list[str]]:
        """Each command as words, without comments."""
        return (
            [shlex.split(line, comments=True) for line in self.text.splitlines()] if self.is_commands else []
        )

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_of(page: str) -> list[Block]:
    """All of a page, in their order."""
    text = text_of(page)
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in BLOCK.finditer(text)
    ]


def inline(page: str) -> list[str]:
    """What a page sets in backquotes, outside of blocks."""
    return INLINE.findall(BLOCK.sub("", text_of(page)))


def inline_commands(page: str) -> list[list[str]]:
    """Whole commands of autopar among a page's lines, as words: with something to do, nothing to replace, and
    no redirection."""
    every = [text.split() for text in inline(page) if text.startswith("autopar ") and ">" not in text]
    whole = [words for words in every if len(words) > 2 and not any(map(PLACEHOLDER.fullmatch, words))]
    return [shlex.split(" ".join(words)) for words in whole if not is_flag_alone(words)]


def is_flag_alone(words: list[str]) -> bool:
    """Whether a command is named for one flag of it alone, as `autopar run --compile`."""
    return len(words) == 3 and words[2].startswith("--") and words[1] != "show"


def files_of(page: str) -> dict[str, str]:
    """The files that a reader of a page writes."""
    return {block.file: block.text for block in blocks_of(page) if block.file}
