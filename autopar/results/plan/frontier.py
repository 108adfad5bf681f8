"""Seconds and bytes as a frontier: the fastest plans that were found under memory caps, as data.

bytes ^ o                 each o was solved under a cap; a plan that is slower and needs
      |    o  x           no less, x, isn't kept
      |        o---o
      +--------------->  seconds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.results.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of the frontier: it was solved under a cap of `memory_cap` bytes, None without one. No plan of
    the same mesh, stages and micro-batches under that cap is faster by more than the gap."""

    memory_cap: int | None
    step_seconds: float
    peak_bytes: int
    gap: float

    @staticmethod
    def of(plan: Plan) -> Point:
        """The frontier's point of a plan."""
        return Point(plan.memory_cap, plan.step_seconds, plan.peak_bytes, plan.gap)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Points from the fastest to the leanest. Under a cap of `infeasible` bytes no plan was found, None if
    none was refused; `untried` caps were left when time was over."""

    points: tuple[Point, ...]
    infeasible: int | None = None
    untried: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The frontier as the command line's JSON shows it."""
        return asdict(self) | {"points": [asdict(point) for point in self.points]}


def undominated(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points beside which no other is as fast and as lean, from the fastest on."""
    found: list[Point] = []
    for point in sorted(points, key=lambda each: (each.step_seconds, each.peak_bytes)):
        if not found or point.peak_bytes < found[-1].peak_bytes:
            found.append(point)
    return tuple(found)
