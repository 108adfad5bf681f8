"""Taking times on a CPU as a step meets its memory: all calls forward, then all backward, round after round.

    round 1   a> b> c> ...  a< b< c< ...      round 2   a> b> c> ...  a< b< c< ...

In a step weights, and what was saved for backward, were touched long ago; only what the operator before
wrote is still in the caches. Timed over and over by itself, a call finds all of it there, and the code that
it runs: steps of small nets took 1.0 to 1.7 times the processor seconds of their operators by themselves,
GELUs and layer norms in them 2 to 3 times. So between two passes of a call come one of each other, and
before a pass what it gets from its neighbour in a step is written anew.

A call that takes longer takes part in fewer rounds, spread over all; one that surely takes longer than its
budget has been warm since it was made ready. Of new pages of memory see timing.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from costdb.timing import (
    FEW_PAGES,
    MIN_RUNS,
    VISITS,
    WARM_UPS,
    Times,
    between,
    moment,
    new_pages,
    spread,
)

CPU = torch.device("cpu")
ROUNDS = 25
# Of what takes longer than its budget. Of 50 laps of convolutions on a shared machine single ones scattered
# by 12 to 23 % (standard deviation): means of two by 8 to 16 %, and one slow lap counts in full.
LONG_ROUNDS = 3
SURELY = 2  # budgets that the first run takes of what isn't just slow for once


class Passes(Protocol):
    """A call, ready to run, and how long it took for the first time, at most."""

    first_seconds: float

    def arrive(self) -> None:
        """Write what its forward pass gets from the operator before."""

    def forward_pass(self) -> None:
        """Run forward; what it gives stays until it is let go."""

    def arrive_back(self) -> None:
        """Write the gradients that its backward pass gets from the operator after."""

    def backward_pass(self) -> None:
        """Run backward, if it has one."""

    def let_go(self) -> None:
        """Free what both passes made."""


def in_rounds(calls: Sequence[Passes], budget: float) -> list[Times]:
    """Seconds of `calls`, forward and backward, each timed for about `budget` seconds."""
    timed = [_Timed(call, call.first_seconds) for call in calls]
    for most in (SURELY * budget, *[budget] * (WARM_UPS - 1)):
        for each in [each for each in timed if each.seconds <= most]:
            each.warm_up()
    for number in range(ROUNDS):
        taking = [each for each in timed if each.takes_part(number, budget)]
        for each in taking:
            each.forward()
        for each in taking:
            each.backward()
    return [each.times() for each in timed]


@dataclass(frozen=True, slots=True)
class _Lap:
    """One pass of a call, and the pages that it met first."""

    seconds: float
    pages: int


@dataclass(slots=True)
class _Timed:
    """A call, and what its rounds found; `seconds` are those of a run that didn't count."""

    call: Passes
    seconds: float
    laps: list[tuple[_Lap, _Lap]] = field(default_factory=list)
    _first: _Lap = _Lap(0.0, 0)

    def warm_up(self) -> None:
        start = moment(CPU)
        self.call.forward_pass()
        self.call.arrive_back()
        self.call.backward_pass()
        self.call.let_go()
        self.seconds = between(start, moment(CPU))

    def takes_part(self, number: int, budget: float) -> bool:
        """Whether it runs in that round, so that its rounds lie evenly among all."""
        count = self.rounds(budget)
        return (number + 1) * count // ROUNDS > number * count // ROUNDS

    def rounds(self, budget: float) -> int:
        if self.seconds > budget:
            return LONG_ROUNDS
        return max(VISITS, min(ROUNDS, int(budget / max(self.seconds, 1e-9))))

    def forward(self) -> None:
        self.call.arrive()
        self._first = _lap(self.call.forward_pass)

    def backward(self) -> None:
        self.call.arrive_back()
        self.laps.append((self._first, _lap(self.call.backward_pass)))
        self.call.let_go()

    def times(self) -> Times:
        whole = [first.seconds + second.seconds for first, second in self.laps]
        passes = zip(*self.laps, strict=True)
        return Times(
            parts=tuple(_median(laps) for laps in passes),
            runs=len(whole),
            spread=spread(whole),
            least=min(whole),
        )


def _median(laps: Sequence[_Lap]) -> float:
    """The median of the passes that met no new pages, where there are enough of them."""
    settled = [lap.seconds for lap in laps if lap.pages <= FEW_PAGES]
    enough = len(settled) >= min(MIN_RUNS, len(laps))
    return statistics.median(settled if enough else [lap.seconds for lap in laps])


def _lap(run: Callable[[], None]) -> _Lap:
    before, start = new_pages(), moment(CPU)
    run()
    end = moment(CPU)
    return _Lap(between(start, end), new_pages() - before)
