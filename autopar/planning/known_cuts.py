"""Cuts that are known: prices of memory often lead to one assignment, which is cut into stages once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.core.program import Program
from autopar.errors import InfeasibleError
from autopar.solve.program.solution import CutoffError, check_cutoff
from autopar.solve.stages.step import Step

REMEMBERED_ASSIGNMENTS = 16  # whose cuts are known


@dataclass(frozen=True, slots=True)
class KnownCut:
    """An assignment that was cut into stages, what was asked of its cuts, and what they came to."""

    program: Program
    asked: object
    outcome: Step | InfeasibleError

    def repeated(self, cutoff: float, limit: float) -> Step:
        """Repeat the step or error that is known; raises CutoffError where `staged` would."""
        if isinstance(self.outcome, InfeasibleError):
            raise self.outcome
        check_cutoff(self.outcome.bound, cutoff)
        check_cutoff(self.outcome.free, limit)
        return self.outcome


@dataclass(slots=True)
class KnownCuts:
    """The last cuts of one mesh's assignments."""

    known: deque[KnownCut] = field(default_factory=lambda: deque(maxlen=REMEMBERED_ASSIGNMENTS))

    def step(
        self, program: Program, asked: object, cut: Callable[[], Step], *, cutoff: float, limit: float
    ) -> Step:
        """The step that `cut` finds, or the error that it raises, of an assignment and what is asked; it is
        not called for what is known. A CutoffError says too little to be kept."""
        for each in self.known:
            if each.asked == asked and each.program == program:
                return each.repeated(cutoff, limit)
        try:
            step = cut()
        except CutoffError:
            raise
        except InfeasibleError as error:
            self.known.append(KnownCut(program, asked, error))
            raise
        self.known.append(KnownCut(program, asked, step))
        return step
