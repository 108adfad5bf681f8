"""What `autopar doctor` found: a line for each thing that it looked at, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class State(Enum):
    """Health of an examined thing: `WARN` if it works, but not as it could."""

    OK = "ok"
    WARN = "warn"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `remedy` is empty where it is well."""

    state: State
    what: str
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as the command line's JSON shows it."""
        return {"state": self.state.value, "what": self.what, "found": self.found, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and what each rank that was reached said of itself."""

    findings: tuple[Finding, ...]
    ranks: tuple[Mapping[str, Any], ...] = ()

    @property
    def passed(self) -> bool:
        return all(finding.state is not State.WRONG for finding in self.findings)

    def count(self, state: State) -> int:
        return sum(finding.state is state for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The examination as the command line's JSON shows it."""
        return {
            "passed": self.passed,
            "findings": [finding.as_dict() for finding in self.findings],
            "ranks": [dict(rank) for rank in self.ranks],
        }


def ok(what: str, found: str) -> Finding:
    """A thing that is well."""
    return Finding(State.OK, what, found)


def warn(what: str, found: str, remedy: str) -> Finding:
    """A thing that works, but not as it could."""
    return Finding(State.WARN, what, found, remedy)


def wrong(what: str, found: str, remedy: str) -> Finding:
    """A thing that doesn't work."""
    return Finding(State.WRONG, what, found, remedy)
