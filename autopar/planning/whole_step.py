"""The best step without stages on one mesh, where sums of gradients may hide behind what is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.core.costs import MEASURED_ERROR
from autopar.errors import AutoparError, InfeasibleError, SolverError
from autopar.planning.apart import margin
from autopar.planning.asked.ask import Ask, Limits
from autopar.planning.assignment_problem import AssignmentProblem
from autopar.solve.assignment.multipliers import MultiplierSearch
from autopar.solve.assignment.written_programs import WrittenPrograms
from autopar.solve.program.solution import CutoffError, Solution, UnbeatenError, check_cutoff
from autopar.solve.stages.step import Step, unstaged
from autopar.solve.stages.unlike_blocks import turned

SECONDS_TOLERANCE = 1e-9  # of seconds: less is rounding
MULTIPLIERS = 5  # tried of what hides: 1, 0, and between
UNLIKE = 5e-3  # gap that blocks which are unlike may close


@dataclass(frozen=True, slots=True)
class WholeStep:
    """The best step without stages, of assignments under multipliers."""

    problem: AssignmentProblem

    def best(self, ask: Ask, limits: Limits) -> Step:
        """The best step without stages.

        Sums S of gradients hide behind backward B: E >= S - theta B and E >= 0. With a multiplier on that
        row, in [0, 1], a solve is one of other costs, and bounds all plans: 1 is right where sums show, 0
        where they hide, and between the two it is where the lines of known assignments meet (multipliers.py).

        Where other exchanges start early, there are two rows: of all of them, A, behind all that is computed,
        C, and of sums of activations, T, behind the gradients of weights, W: E >= A - theta C,
        E >= T - theta W. The second one counts once, by itself, where the first leaves a gap.
        """
        count = self.problem.request.micro_batches
        if not self.problem.prices.overlap:
            return unstaged(self.problem.solve(ask, limits), count)
        found, bound = self.hidden(ask.uncapped, limits)
        if ask.cap is not None and self.quickest(found).peak.nbytes > ask.cap:
            check_cutoff(bound, limits.cutoff)
            found, capped = self.hidden(ask, limits)
            bound = max(bound, capped)
        step = unstaged(self.quickest(found), count)
        step = dataclasses.replace(step, bound=min(max(bound, step.calls), step.seconds))
        return self.unlike(step, found, ask) if step.gap > max(UNLIKE, self.problem.request.gap) else step

    def quickest(self, found: Sequence[Solution]) -> Solution:
        """The one with the shortest step."""
        return min(found, key=lambda each: each.priced.cost.of(self.problem.request.micro_batches))

    def hidden(self, ask: Ask, limits: Limits) -> tuple[list[Solution], float]:
        """Assignments that are best under multipliers, and seconds that no step takes less than."""
        count = self.problem.request.micro_batches
        found, bound, programs = list[Solution](), 0.0, WrittenPrograms()
        search = MultiplierSearch(self.problem.request.gap, bisects=self.problem.prices.early)
        for number in range(MULTIPLIERS + self.problem.prices.early):
            late = float(number == MULTIPLIERS)
            try:
                row = dataclasses.replace(ask, multiplier=search.multiplier * (1.0 - late), late=late)
                solution = self.problem.solve(row, limits, programs)
            except (InfeasibleError, SolverError) as error:
                if not found:
                    raise
                bound = max(bound, proved(error, limits.cutoff, count))
                break
            priced = solution.priced.at(self.problem.prices)
            found.append(dataclasses.replace(solution, priced=priced, seconds=priced.seconds))
            seconds = priced.cost.of(count)
            quickest = self.quickest(found)
            if ask.cap is not None and ask.force == self.problem.request.force:
                self.problem.first = quickest
            least = quickest.priced.cost.of(count)
            bound = max(bound, count * solution.bound)
            if least - bound <= max(self.problem.request.gap, SECONDS_TOLERANCE) * least:
                break
            search.note(solution.seconds, seconds / count, shows=priced.cost.exposed_sums)
            if search.is_over:
                break
        return found, bound

    def unlike(self, best: Step, found: Sequence[Solution], ask: Ask) -> Step:
        """The best step, or one whose blocks mix two of those `found`, if that can be told apart.

        These are the last ones whose sums show and whose sums hide. Blocks that are alike are simpler.
        """
        shows, hides = (
            [each for each in found if each.priced.cost.exposed_sums is shown] for shown in (True, False)
        )
        if self.problem.folding.count == 1 or not shows or not hides:
            return best
        count = self.problem.request.micro_batches
        hiding, showing = (unstaged(each[-1], count) for each in (hides, shows))
        priced = turned(hiding, showing, self.problem.folding, count=count, cap=ask.cap)
        if priced is None or priced.cost.of(count) >= (1 - SECONDS_TOLERANCE) * best.seconds:
            return best
        solution = dataclasses.replace(
            best.solution, priced=priced, seconds=priced.seconds, held=priced, status="gap_limit"
        )
        mixed = dataclasses.replace(unstaged(solution, count), bound=best.bound)
        apart = max(MEASURED_ERROR, margin(priced, best.solution.priced))
        return (
            mixed if best.seconds > mixed.seconds * (1 + apart) else dataclasses.replace(best, passed=mixed)
        )


def proved(error: AutoparError, cutoff: float, micro_batches: int) -> float:
    """Seconds that no step takes less than, by the error of a search that ended without one."""
    if isinstance(error, UnbeatenError):
        return micro_batches * error.bound
    return cutoff if isinstance(error, CutoffError) else -math.inf
