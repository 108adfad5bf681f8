"""Plans on more and more devices as data: seconds of the same step, and what each device is worth.

speed-up      seconds on the fewest devices / seconds here
efficiency    speed-up x the fewest / devices: 100 % if the work of the fewest were shared without loss
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autopar.results.plan.plan import Plan

LEAST_WORTH = 0.5  # of a device's work: what makes less of it is hardly worth its price


@dataclass(frozen=True, slots=True)
class Scaled:
    """The best plan on `devices` devices, as `shown`; `reason` says why there is none."""

    devices: int
    shown: str
    plan: Plan | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """One row for each number of devices, the fewest first."""

    rows: tuple[Scaled, ...]

    @property
    def planned(self) -> tuple[Scaled, ...]:
        """The rows that have a plan."""
        return tuple(row for row in self.rows if row.plan is not None)

    def speed_up(self, row: Scaled) -> float | None:
        """How much faster a step is than on the fewest devices that have a plan."""
        fewest = self.planned[0].plan if self.planned else None
        return fewest.step_seconds / row.plan.step_seconds if fewest and row.plan else None

    def efficiency(self, row: Scaled) -> float | None:
        """What a device does of what it does among the fewest."""
        speed_up = self.speed_up(row)
        return None if speed_up is None else speed_up * self.planned[0].devices / row.devices

    @property
    def fastest(self) -> Scaled | None:
        """The row with the shortest step; of equal ones that with fewer devices."""
        return min(self.planned, key=lambda row: row.plan.step_seconds if row.plan else 0.0, default=None)

    @property
    def worth(self) -> Scaled | None:
        """The largest row up to which every further device does at least half of its work."""
        found = next(iter(self.planned), None)
        for last, row in pairwise(self.planned):
            assert last.plan is not None and row.plan is not None
            gained = last.plan.step_seconds / row.plan.step_seconds - 1
            if gained < LEAST_WORTH * (row.devices / last.devices - 1):
                break
            found = row
        return found

    def as_dict(self) -> dict[str, Any]:
        """The table as the command line's JSON shows it."""
        worth, fastest = self.worth, self.fastest
        return {
            "rows": [
                {
                    "devices": row.devices,
                    "cluster": row.shown,
                    "step_seconds": row.plan.step_seconds if row.plan else None,
                    "speed_up": self.speed_up(row),
                    "efficiency": self.efficiency(row),
                    "peak_bytes": row.plan.peak_bytes if row.plan else None,
                    "gap": row.plan.gap if row.plan else None,
                    "reason": row.reason,
                }
                for row in self.rows
            ],
            "worth": worth.devices if worth else None,
            "fastest": fastest.devices if fastest else None,
        }
