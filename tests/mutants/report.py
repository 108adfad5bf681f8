"""What the tests noticed, by room, and each slip that they did not.

A file of verdicts says of survivors, by their keys, why they may live:

    3f2a90c17b = "equivalent"   # the program does the same
    91bb0e44d2 = "message"      # only a text or a picture differs
    0c7d12aa90 = "speed"        # only the time differs
    77ab3490ce = "missed"       # a test is wanted

The rate is over the slips that change behaviour: without those of the first three verdicts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.run import Outcome, Trial

EXCUSES = ("equivalent", "message", "speed")
VERDICTS = (*EXCUSES, "missed")
MOST_LINES = 3  # of either side of a difference that are shown
ROW = "{:<24}{:>8}{:>8}{:>10}{:>12}{:>9}{:>8}"


def verdicts(path: Path) -> dict[str, str]:
    """Those of a file; none if it isn't there."""
    found: dict[str, str] = tomllib.loads(path.read_text()) if path.exists() else {}
    unknown = sorted(set(found.values()) - set(VERDICTS))
    if unknown:
        raise ValueError(f"{path}: found {', '.join(unknown)}, wanted one of {', '.join(VERDICTS)}")
    return found


@dataclass(frozen=True, slots=True)
class Tally:
    """Of one room, or of all."""

    trials: Sequence[Trial]
    excused: int

    def count(self, outcome: Outcome) -> int:
        return sum(trial.outcome is outcome for trial in self.trials)

    @property
    def rate(self) -> str:
        """Of slips that change behaviour, the share that was noticed."""
        matter = len(self.trials) - self.excused
        return f"{self.count(Outcome.CAUGHT) / matter:.0%}" if matter else "-"

    def row(self, name: str) -> str:
        counts = (self.count(outcome) for outcome in Outcome)
        return ROW.format(name, len(self.trials), *counts, self.excused, self.rate)


def report(trials: Sequence[Trial], sources: Mapping[str, bytes], known: Mapping[str, str]) -> str:
    """The table, and the survivors in the order of their places; `sources` are the texts of the files."""

    def tally(some: Sequence[Trial]) -> Tally:
        lived = [trial for trial in some if trial.outcome is not Outcome.CAUGHT]
        excused = [trial for trial in lived if known.get(key(trial)) in EXCUSES]
        return Tally(some, len(excused))

    def key(trial: Trial) -> str:
        return trial.slip.key(sources[trial.slip.file])

    rows = [ROW.format("room", "slips", "caught", "survived", "untouched", "excused", "rate")]
    for room in sorted({_room(trial) for trial in trials}):
        rows.append(tally([trial for trial in trials if _room(trial) == room]).row(room))
    rows += [tally(trials).row("all"), ""]
    for trial in sorted(trials, key=lambda trial: (trial.slip.file, trial.slip.start)):
        if trial.outcome is not Outcome.CAUGHT:
            rows += _survivor(trial, sources[trial.slip.file], known.get(key(trial), "no verdict"))
    if trials:
        rows.append(f"{sum(trial.seconds for trial in trials) / len(trials):.1f} s for a slip")
    return "\n".join(rows)


def _room(trial: Trial) -> str:
    return trial.slip.file.rpartition("/")[0]


def _survivor(trial: Trial, source: bytes, verdict: str) -> Iterator[str]:
    slip = trial.slip
    yield f"{slip.key(source)}  {slip.file}:{slip.line}  {slip.kind}  ({trial.outcome.value}; {verdict})"
    for sign, lines in zip("-+", slip.lines(source), strict=True):
        yield from (f"  {sign} {line}" for line in lines[:MOST_LINES])
        if len(lines) > MOST_LINES:
            yield f"  {sign} ..."
    yield ""
