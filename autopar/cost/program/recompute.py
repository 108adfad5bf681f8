"""Operators that are recomputed in backward: what that costs, and what need not be kept then.

    operators     0  1 [2  3  4  5  6] 7           [2, 7) is recomputed
    keep             x     x     x                 3 keeps its operand, 5 its result

Backward begins with what the part was given, and runs it once more up to the last operator that has
something to keep: 2 to 5 here, or 2 to 4 if 5 keeps its operand alone, which is there before it runs.
Memory that is made inside and that nobody outside keeps is spared; what the part is given is kept instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost.interval_table import Rectangles, Row, Table
from autopar.cost.program.storages import lives

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram


@dataclass(frozen=True, slots=True)
class Savings:
    """Cost and gain of recomputing the operators [p, q), as tables over `places`: `seconds` for each
    micro-batch, bytes `spared` between forward and backward, and bytes `taken` instead, the part's operands.
    """

    places: tuple[int, ...]
    seconds: Table
    spared: Table
    taken: Table


@dataclass(frozen=True, slots=True)
class Shares:
    """For each operator the `seconds` to recompute it and the `spared` bytes, at best: those of its results,
    and its own. Beside that at most `offload_rate` bytes are copied to the host in a second of a stage's
    forward."""

    seconds: Row
    spared: Row
    offload_rate: float = 0.0


def repeats(priced: PricedProgram) -> list[tuple[int, int, float]]:
    """(operator, until, seconds) of every operator that keeps something itself or has a later one that
    does: it is run again in each part that has both it and `until`."""
    found: list[tuple[int, int, float]] = []
    until: int | None = None
    for place, price in reversed(list(enumerate(priced.operator_prices))):
        if price.saved.results or price.saved.extra_bytes:
            until = place
        if until is not None:
            found.append((place, until, price.recompute))
        if price.saved.operands:
            until = place
    return found[::-1]


def repeated(priced: PricedProgram) -> list[tuple[int, int, float]]:
    """The `repeats` of the program's recomputed parts."""
    if not priced.program.recompute:
        return []
    ends = {place: stop for first, stop in priced.program.recompute for place in range(first, stop)}
    return [item for item in repeats(priced) if item[1] < ends.get(item[0], 0)]


def recompute_seconds(priced: PricedProgram) -> float:
    """Seconds of a micro-batch that the program's recomputed parts take in backward."""
    return sum(seconds for _, _, seconds in repeated(priced))


def savings(priced: PricedProgram, places: Sequence[int]) -> Savings:
    """Tables of what every part from place to place would cost and spare if it alone were recomputed.

    `places` begin with 0 and end with the number of operators; `program.recompute` does not count.
    """
    seconds, spared, taken = (Rectangles(places) for _ in range(3))
    for place, until, cost in repeats(priced):
        seconds.add_first(place, until, cost)
    for life in lives(priced):
        nbytes, before = float(life.nbytes), life.maker
        if life.held and life.maker >= 0 and not life.keepers:
            taken.add_first(life.maker, life.maker, nbytes)
        if life.keepers and not life.held:
            spared.add_first(life.maker, life.keepers[-1], nbytes)
        for user in () if life.keepers else life.uses:
            taken.add(before, user, nbytes)
            before = max(before, user)
    return Savings(tuple(places), seconds.total(), spared.total(), taken.total())


def shares(priced: PricedProgram) -> Shares:
    """Seconds and bytes that recomputing each operator alone could spare. Saved bytes are spared only if
    their maker runs again, so no parts spare as many for fewer seconds."""
    chosen = priced.operator_prices
    spared = np.zeros(len(chosen))
    for life in lives(priced):
        if life.keepers and not life.held:
            spared[life.maker] += life.nbytes
    return Shares(np.asarray([price.recompute for price in chosen]), spared)
