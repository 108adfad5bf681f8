"""Plans that differ from one that is known by a single choice, where memory is scarce.

The linear program knows what is saved for backward, not what is there for a moment, and parts that are
recomputed only roughly. So the plan that it likes best may not be the best that fits, but near it:

    one operator class, or an input, or an output, is split another way      conversions follow (decode.py)
    what is recomputed stays, or none is, or it is fitted anew           recompute.py
    beside it what waits in the host's memory, or alone                      offload.py

Every plan is replayed exactly; those that take longer than the best one before anything is recomputed are
left out. Changes go on from the best, until none helps, the effort is spent or the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.core.gathering import Gathering
from autopar.core.offload import Offload
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.cost.program.peak_memory import Peak
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import RuleError
from autopar.solve.memory.offload import fit_by_offload
from autopar.solve.memory.recompute import fit
from autopar.solve.program.decode import Choices, choices_of, decoded
from autopar.solve.program.problem import Problem

NEIGHBOR_EFFORT = 8_000  # operators that are replayed, from all starts
FITTING = 100  # replays that it takes to fit parts anew, about
FASTER = 1e-9  # relative

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """A plan with what it takes."""

    priced: PricedProgram
    seconds: float

    @property
    def program(self) -> Program:
        return self.priced.program

    @property
    def peak(self) -> Peak:
        return self.priced.peak

    def excess(self, cap: int) -> int:
        return max(0, self.peak.nbytes - cap)


def search_locally(
    problem: Problem,
    starts: Sequence[CandidatePlan],
    cap: int,
    recompute: Recompute,
    *,
    offload: Offload = Offload.NONE,
    deadline: float | None = None,
    effort: int = NEIGHBOR_EFFORT,
) -> CandidatePlan:
    """The best plan that changes lead to from any of `starts`, the most promising first, with effort left:
    one that fits `cap`, or needs less, and is faster. After `deadline`, by the monotonic clock, no other is
    tried, nor when as many operators have been replayed as `effort` says."""
    descent, ends = _PlacementDescent(problem, cap, recompute, offload, starts[0], deadline, effort), []
    for place, start in enumerate(starts):
        if not descent.over() and all(start.program != each.program for each in starts[:place]):
            descent.found = start
            ends.append(descent.best())
    return min((*ends, *starts), key=lambda each: (each.excess(cap), each.seconds))


@dataclass(slots=True)
class _PlacementDescent:
    problem: Problem
    cap: int
    recompute: Recompute
    offload: Offload
    found: CandidatePlan
    deadline: float | None
    left: int

    def over(self) -> bool:
        return self.left <= 0 or self.late()

    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def best(self) -> CandidatePlan:
        while not self.over() and (self.steps_down() or self.fitted_anew() or self.steps_down(twice=True)):
            pass
        return self.found

    def steps_down(self, *, twice: bool = False) -> bool:
        """Take every change, or pair of changes if there are few, that makes the plan better; tells if any
        did. Each is tried with the same recomputed parts, and without."""
        better = False
        for plain, _ in self.changes(twice=twice):
            for parts in dict.fromkeys(((), self.found.program.recompute)):
                better = self.takes(self.replayed(plain.remedied(recompute=parts))) or better
            if self.over():
                break
        return better

    def fitted_anew(self) -> bool:
        """Take the first change that makes the plan better with recomputed parts and offloaded tensors fitted
        to it; tells if any did."""
        if self.recompute is not Recompute.AUTO and self.offload is not Offload.AUTO:
            return False
        for plain, _ in sorted(self.changes(), key=lambda each: each[1]):
            self.left -= FITTING * len(plain.program.strategies)
            if self.over():
                break
            if self.takes(self.replayed(self.fitted(plain))):
                return True
        return False

    def fitted(self, plain: PricedProgram) -> PricedProgram:
        if self.offload is Offload.NONE:
            return fit(plain, self.cap).priced
        return fit_by_offload(plain, self.cap, recompute=self.recompute, offload=self.offload).priced

    def takes(self, other: CandidatePlan) -> bool:
        mine, theirs = self.found.excess(self.cap), other.excess(self.cap)
        better = theirs < mine or theirs == mine and other.seconds < self.found.seconds * (1 - FASTER)
        if better:
            self.found = other
        return better

    def changes(self, *, twice: bool = False) -> Iterator[tuple[PricedProgram, float]]:
        """Plans one change away, and that itself, without parts that are recomputed, with their seconds:
        those that could be better. Or two changes away, unless that takes too long."""
        start = choices_of(self.problem, self.found.program)
        tried = [start, *neighbors(self.problem, start)]
        if twice:
            few = len(tried) ** 2 * len(self.found.program.strategies) < self.left
            tried = [each for one in tried for each in neighbors(self.problem, one)] if few else []
        for choices in tried:
            if self.over():
                break
            for program in self.decoded(choices):
                self.left -= len(program.strategies)
                priced = PricedProgram(self.problem.prices, program)
                seconds = priced.seconds
                if self.found.excess(self.cap) or seconds < self.found.seconds * (1 - FASTER):
                    yield priced, seconds

    def decoded(self, choices: Choices) -> list[Program]:
        """The program of these choices, and with conversions that are cheaper but may hold more, if any; none
        if a layout can't be converted."""
        try:
            direct = decoded(self.problem, choices)
        except RuleError:
            return []
        around = decoded(self.problem, choices, around=True)
        return [direct] if around.moves == direct.moves else [direct, around]

    def replayed(self, priced: PricedProgram) -> CandidatePlan:
        self.left -= len(priced.program.strategies)
        return CandidatePlan(priced, priced.seconds)


def neighbors(problem: Problem, choices: Choices) -> Iterator[Choices]:
    """Yields the choices with one of them made another way."""
    for name, chosen in choices.strategies.items():
        for strategy in problem.space.strategies[name]:
            if strategy != chosen:
                yield replace(choices, strategies=_with(choices.strategies, name, strategy))
    for name, stored in choices.stored.items():
        for other in problem.inputs[name]:
            if other != stored and not problem.wiring.is_fixed(name):
                yield replace(choices, stored=_with(choices.stored, name, other))
    for name, way in choices.casts.items():
        if problem.regathered[name] is not None:
            other_way = Gathering.KEEP if way is Gathering.REGATHER else Gathering.REGATHER
            yield replace(choices, casts=_with(choices.casts, name, other_way))
    for name, layout in choices.outputs.items():
        for place in problem.output_layouts[name]:
            if place != layout:
                yield replace(choices, outputs=_with(choices.outputs, name, place))


def _with(before: Mapping[str, Value], name: str, value: Value) -> dict[str, Value]:
    return {**before, name: value}
