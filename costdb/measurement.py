"""The two kinds of measurement, as frozen data; bad numbers are refused where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from autopar.core.costs import Collective, SavedByCall, refuse_bad
from autopar.errors import InputError

IQR = 1.349  # standard deviations between the quartiles of a normal distribution
ERROR_OF_MEDIAN = math.sqrt(math.pi / 2)  # by that of the mean


def now() -> str:
    """The time of a measurement as the database holds it: UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds of one local operator call, of `runs` runs (`costdb.timing.Times`).

    `saved_bytes` counts every storage saved for backward once, operands and results included;
    `scratch_bytes` is the largest temporary memory beyond operands, results and saved tensors, None
    where the device has no counter. `spread` is the interquartile range over the median.
    """

    key: str
    forward_seconds: float
    backward_seconds: float
    saved: SavedByCall
    saved_bytes: int
    scratch_bytes: int | None
    runs: int
    spread: float
    measured_at: str = field(default_factory=now)

    def __post_init__(self) -> None:
        refuse_bad(
            f"measurement of {self.key}",
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
            saved_bytes=self.saved_bytes,
            saved_extra_bytes=self.saved.extra_bytes,
            scratch_bytes=self.scratch_bytes or 0,
            spread=self.spread,
        )

    @property
    def noise(self) -> float:
        """The standard error of its seconds, relative, as that of the median of normal laps."""
        return ERROR_OF_MEDIAN * self.spread / IQR / math.sqrt(max(1, self.runs))

    def scaled(self, factor: float) -> Measurement:
        """Copy the measurement with `factor` times the seconds."""
        return replace(
            self,
            forward_seconds=factor * self.forward_seconds,
            backward_seconds=factor * self.backward_seconds,
        )


@dataclass(frozen=True, slots=True)
class CollectiveMeasurement:
    """The median of one collective, the slowest rank's. `nbytes` is the full (gathered) tensor's
    size, the message's for send and receive; the group spans `nodes` nodes."""

    kind: Collective
    backend: str
    size: int
    nodes: int
    nbytes: int
    seconds: float
    runs: int
    spread: float
    measured_at: str = field(default_factory=now)

    def __post_init__(self) -> None:
        where = f"measurement of {self.kind.value} over {self.size} ranks, {self.nbytes} bytes"
        refuse_bad(where, seconds=self.seconds, spread=self.spread, nbytes=self.nbytes)
        if self.size < 1 or not 1 <= self.nodes <= self.size:
            raise InputError(
                where=where,
                found=f"a group of {self.size} ranks on {self.nodes} nodes",
                wanted="at least one rank on each node",
                remedy="measure again",
            )
