"""What is asked of a search, how long it may go on, and what it may measure with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.core.force import Force
from autopar.core.recompute import Recompute
from autopar.cost.machine.measuring import Budget, CoRunners, Progress
from autopar.solve.choices.memory_price import FREE, MemoryPrice
from autopar.solve.stages.step import Step
from costdb.database import Database


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


@dataclass(frozen=True, slots=True)
class SearchMeans:
    """What a search has: a database of costs, who hears of its `progress`, ranks that run along while
    operators are measured, seconds for that, and a deadline; of the last two the request's if it has none."""

    database: Database | None = None
    progress: Progress | None = None
    co_runners: CoRunners | None = None
    budget: Budget | None = None
    deadline: float | None = None


NO_MEANS = SearchMeans()
