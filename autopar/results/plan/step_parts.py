"""Where the seconds of a step go, as data: parts that add up to it, and what goes on meanwhile."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step on the average pipeline rank: all but `hidden` add up to the step.

    `communication` are the exchanges that forward and backward wait for; `hops` the waits for a message of
    another stage that is under way, `waits` those for a stage that still computes, or for the calls of a
    GPU's host; `sums` what is added up of gradients, and gathered of weights, once a step; `copies` waits for
    the host's memory. `ties` are no
    seconds of the machine: the search adds them for bytes that are kept, so that of equal plans the leaner
    one wins. `hidden` is communication that goes on while a rank computes: it costs nothing.
    """

    compute: float = 0.0
    recompute: float = 0.0
    communication: float = 0.0
    copies: float = 0.0
    hops: float = 0.0
    waits: float = 0.0
    sums: float = 0.0
    optimizer: float = 0.0
    ties: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.as_dict().values()) - self.hidden

    def as_dict(self) -> dict[str, float]:
        """Seconds by the name of the part."""
        return asdict(self)
