"""Neighbors of a known assignment, each cut into stages: the fastest as a whole may not be the fastest cut.

    assignment A    40 seconds    |------ 24 ------|--- 16 ---|      a step goes by the slower stage
    assignment B    41 seconds    |----- 21 -----|---- 20 ----|      faster

A neighbour differs by one choice, or by two where there are few (placement/local_search.py). Cutting takes
longer than replaying, so only small graphs are searched so, in which stages are uneven: of many operators
some cut is even enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.core.program import Program
from autopar.errors import InfeasibleError, RuleError
from autopar.solve.program.decode import Choices, choices_of, decoded
from autopar.solve.program.local_search import FASTER, neighbors
from autopar.solve.program.problem import Problem
from autopar.solve.stages.step import Step

CUT_EFFORT = 4_000  # operators that are cut
FEWEST_CUTS_IF_SCARCE = 100  # cuts: fewer are not worth to begin where memory is scarce
FEWEST_CUTS = 300  # nor are fewer than these where it is not


def cuts_left(operators: int) -> int:
    """Most assignments of so many operators that `improved_step` cuts."""
    return CUT_EFFORT // operators


def is_worthwhile(operators: int, *, scarce: bool) -> bool:
    """Whether enough neighbours can be cut for a search to be worth it. Where memory is scarce, fewer
    suffice: the fastest may be far from the best."""
    return cuts_left(operators) >= (FEWEST_CUTS_IF_SCARCE if scarce else FEWEST_CUTS)


def improved_step(
    problem: Problem,
    start: Program,
    known: Step | None,
    cut: Callable[[Program], Step],
    *,
    deadline: float | None = None,
) -> Step | None:
    """The best step that changes lead to from an assignment, of which `known` is the step if it has one; None
    if there is none. `cut` gives an assignment's step or raises InfeasibleError. After `deadline`, by the
    monotonic clock, nothing is cut any more."""
    descent = _StagedDescent(problem, cut, choices_of(problem, start), known, deadline)
    while descent.steps_down() or descent.steps_down(twice=True):
        pass
    best = descent.best
    return replace(best, bound=min(best.seconds, known.bound)) if best and known else best


@dataclass(slots=True)
class _StagedDescent:
    problem: Problem
    cut: Callable[[Program], Step]
    choices: Choices
    best: Step | None
    deadline: float | None
    missing: float = math.inf  # bytes, while there is no step that fits
    left: int = field(init=False)
    tried: set[object] = field(init=False)

    def __post_init__(self) -> None:
        operators = sum(map(len, self.problem.operators.members.values()))
        self.left, self.tried = cuts_left(operators), {_key(self.choices)}

    def steps_down(self, *, twice: bool = False) -> bool:
        """Take every change, or pair of changes if there are few, that makes the step better; tells if any
        did."""
        better = False
        untried = list(neighbors(self.problem, self.choices))
        if twice:
            few = len(untried) ** 2 < self.left
            untried = [each for one in untried for each in neighbors(self.problem, one)] if few else []
        for choices in untried:
            if self.left <= 0 or self.deadline is not None and time.monotonic() >= self.deadline:
                return False
            if _key(choices) not in self.tried:
                self.tried.add(_key(choices))
                better = self.takes(choices) or better
        return better

    def takes(self, choices: Choices) -> bool:
        try:
            program = decoded(self.problem, choices)
            self.left -= 1
            step = self.cut(program)
        except RuleError:
            return False
        except InfeasibleError as error:
            if self.best or error.least is None or error.least >= self.missing:
                return False
            self.choices, self.missing = choices, error.least
            return True
        if self.best and step.seconds >= self.best.seconds * (1 - FASTER):
            return False
        self.choices, self.best = choices, step
        return True


def _key(choices: Choices) -> object:
    made = choices.strategies, choices.stored, choices.outputs, choices.casts
    return tuple(tuple(each.values()) for each in made)
