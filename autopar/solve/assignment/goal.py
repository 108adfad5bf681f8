"""What an assignment is to be, and how much may be done to find it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.core.offload import Offload
from autopar.core.recompute import Recompute
from autopar.solve.choices.memory_price import FREE, MemoryPrice


@dataclass(frozen=True, slots=True)
class Goal:
    """The cheapest plan whose predicted peak is at most `cap` bytes a device, as near to the bound as `gap`.

    With a `memory_price`, which excludes a cap, the cheapest by seconds and memory together; its bound is
    then none on seconds, -inf. So it is if it need not be `bounded`, which saves time. Parts may be computed
    again (`recompute`), and tensors wait in the host's memory (`offload`), so that it fits. None is wanted
    that takes `cutoff` seconds by the relaxation; a plan of `known` seconds meets the cap already.
    """

    cap: int | None = None
    gap: float = 1e-4
    memory_price: MemoryPrice = FREE
    bounded: bool = True
    recompute: Recompute = Recompute.NONE
    offload: Offload = Offload.NONE
    cutoff: float = math.inf
    known: float = math.inf


@dataclass(frozen=True, slots=True)
class Effort:
    """Seconds of a search at most, work of the solver on one program, and whether few rounds will do."""

    time_limit: float | None = None
    work: float = math.inf
    brief: bool = False


ANY_PLAN, ANY_EFFORT = Goal(), Effort()
