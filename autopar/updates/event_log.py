"""What a server did, in its order: enough for one process to come to the same parameters.

update 3    learner 2, its batch 1, at parameters 1 (2 old)  +  learner 1, its batch 3, at parameters 2
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GradientEvent:
    """A gradient that counted: whose, of which of its batches, at which parameters; in order of the sum."""

    learner: int
    batch: int
    version: int


@dataclass(slots=True)
class EventLog:
    """The updates of a run, each the gradients that it is the mean of; `dropped` are batches given up."""

    updates: list[tuple[GradientEvent, ...]] = field(default_factory=list)
    dropped: list[GradientEvent] = field(default_factory=list)

    @property
    def staleness(self) -> dict[int, int]:
        """How many gradients were how many updates old."""
        return dict(
            sorted(
                Counter(
                    version - event.version for version, events in enumerate(self.updates) for event in events
                ).items()
            )
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "updates": [[asdict(event) for event in events] for events in self.updates],
            "dropped": [asdict(event) for event in self.dropped],
            "staleness": self.staleness,
        }

    def __str__(self) -> str:
        old = ", ".join(f"{count} of {age}" for age, count in self.staleness.items())
        ages = f"gradients by age in updates: {old or 'none'}"
        return f"{len(self.updates)} updates; {ages}; {len(self.dropped)} dropped"
