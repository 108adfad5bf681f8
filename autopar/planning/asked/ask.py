"""What is asked of the search on one mesh, and how long it may go on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.core.force import Force
from autopar.core.recompute import Recompute
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.stages.step import Step


@dataclass(frozen=True, slots=True)
class Ask:
    """An assignment that is asked for, and the key of the one that is found: under `force` and a `cap` of
    bytes per device, at a price of memory, with a proven bound or without. With a `multiplier` of what hides
    it is best, and bounded, by other costs, and its bound holds for exposed seconds; else nothing hides, but
    for the bound."""

    force: Force | None = None
    cap: int | None = None
    memory_price: MemoryPrice = FREE
    recompute: Recompute = Recompute.NONE
    bounded: bool = True
    multiplier: float | None = None
    late: float = 0.0  # another one, of exchanges that hide behind gradients of weights

    @property
    def uncapped(self) -> Ask:
        """A copy without a cap."""
        return replace(self, cap=None)


@dataclass(frozen=True, slots=True)
class Limits:
    """Ends of a search: nothing is sought after the `deadline`, nor where no step takes less than `cutoff`
    seconds. What can't be faster than the `incumbent` is timed under its schedule alone. The solver branches
    for as much `work` for one answer."""

    deadline: float | None = None
    cutoff: float = math.inf
    incumbent: Step | None = None
    work: float = math.inf


UNLIMITED = Limits()
