"""What a plan notes, told once where it runs.

On stderr, since stdout is the script's own, and not as Python's warnings, which filters turn into errors or
drop: notes are about the plan and no line of the script is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable


class Announcer:
    """Prints every note that it hasn't printed yet."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, notes: Iterable[str]) -> None:
        for note in notes:
            if note not in self._told:
                self._told.add(note)
                print(f"autopar: {note}", file=sys.stderr, flush=True)
