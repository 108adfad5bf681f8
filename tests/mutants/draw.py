"""Rooms, files and slips, drawn from one seed.

A room is a folder with code in it. Rooms are drawn by the root of their lines, so that a large one doesn't
have all; in a room a file by its lines, in a file a kind, so that numbers, of which there are most, don't
crowd out the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from math import sqrt
from pathlib import Path
from random import Random

from tests.mutants.slips import Slip, is_program, slips

PACKAGES = ("autopar", "costdb")
TRIES = 50  # draws for each slip wanted, where most are known already
TOLD = "progress"  # in the names of files that only tell


class Source:
    """One file of a room."""

    def __init__(self, root: Path, path: Path) -> None:
        self.name, self.room = path.relative_to(root).as_posix(), path.parent.relative_to(root).as_posix()
        self.text = path.read_bytes()
        self.lines = self.text.count(b"\n") + 1

    @cached_property
    def kinds(self) -> dict[str, list[Slip]]:
        kinds: dict[str, list[Slip]] = defaultdict(list)
        for slip in slips(self.name, self.text):
            kinds[slip.kind].append(slip)
        return dict(kinds)


def rooms(root: Path, under: str = "") -> dict[str, list[Source]]:
    """The files of every room of `root`, or of those at and below `under`."""
    found: dict[str, list[Source]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            source = Source(root, path)
            inside = not under or f"{source.room}/".startswith(f"{under.rstrip('/')}/")
            if inside and TOLD not in path.stem:
                found[source.room].append(source)
    return dict(found)


def draw(files: dict[str, list[Source]], count: int, seed: int) -> list[Slip]:
    """At most `count` slips, no two the same; fewer where there are no more."""
    random, found = Random(seed), dict[Slip, None]()
    names = sorted(files)
    weights = [sqrt(sum(source.lines for source in files[name])) for name in names]
    for _ in range(TRIES * count if names else 0):
        if len(found) == count:
            break
        source = _file(files[random.choices(names, weights)[0]], random)
        if source.kinds:
            slip = random.choice(source.kinds[random.choice(sorted(source.kinds))])
            if slip not in found and is_program(slip, source.text):
                found[slip] = None
    return list(found)


def _file(sources: Sequence[Source], random: Random) -> Source:
    return random.choices(sources, [source.lines for source in sources])[0]
