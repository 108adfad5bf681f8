"""A plan of one mesh that was found: its program, what it takes, and what is proved of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.core.offload import Offload
from autopar.core.program import Program
from autopar.core.recompute import Recompute
from autopar.cost.program.peak_memory import Peak
from autopar.cost.program.priced_program import PricedProgram
from autopar.errors import CheckError, InfeasibleError
from autopar.solve.memory.offload import fit_by_offload, offload_everything
from autopar.solve.memory.recompute import everything, fit
from autopar.solve.program.problem import Problem


class CutoffError(InfeasibleError):
    """No plan is faster than one that is known already."""


class UnbeatenError(CutoffError):
    """No plan was found that is faster than one that is known; none takes less than `bound` seconds."""

    bound = -math.inf

    @classmethod
    def of(cls, bound: float, known: float) -> UnbeatenError:
        """The error beside a plan of `known` seconds."""
        error = cls(
            where="plans of this mesh",
            found=f"none in less than {known:.4g} s; at least they take {bound:.4g} s",
            wanted=f"less than {known:.4g} s, which a plan is known to take",
            remedy="take that plan",
        )
        error.bound = bound
        return error


@dataclass(frozen=True, slots=True)
class Solution:
    """A checked plan of one mesh: predicted seconds, a proven lower bound, and the solver's status. With
    stages the peak is still that of the program without, before remedies, which is `held`."""

    priced: PricedProgram
    seconds: float
    bound: float
    status: str
    held: PricedProgram

    @property
    def peak(self) -> Peak:
        """Memory of the plan, replayed when it is asked for."""
        return self.held.peak

    @property
    def program(self) -> Program:
        return self.priced.program

    @property
    def gap(self) -> float:
        """Most by which this plan may be slower than the best possible one, relatively."""
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds > 0 else 0.0


def check_promise(problem: Problem, priced: PricedProgram, promised: float) -> None:
    """Raises CheckError if a program takes longer than was promised."""
    seconds = priced.seconds
    if seconds > promised * (1 + 1e-6):
        promised += _optimism(problem, priced)
    if seconds > promised * (1 + 1e-6) + 1e-12:
        raise CheckError(
            where="plan",
            found=f"{seconds:.6g} s when priced again",
            wanted=f"at most the solver's {promised:.6g} s",
            remedy="report this model",
        )


def completed(
    priced: PricedProgram,
    cap: int | None,
    *,
    recompute: Recompute,
    offload: Offload = Offload.NONE,
    below: float = math.inf,
) -> Solution:
    """The program with what is recomputed and offloaded, if anything, and its cost; without a
    bound. It may not fit where it would take `below` seconds or more."""
    if recompute is Recompute.ALL:
        priced = everything(priced)
    if offload is Offload.ALL:
        priced = offload_everything(priced)
    if cap is not None and offload is not Offload.NONE:
        priced = fit_by_offload(priced, cap, recompute=recompute, offload=offload).priced
    elif cap is not None and recompute is Recompute.AUTO:
        priced = fit(priced, cap, spare=below - priced.seconds).priced
    return Solution(priced, priced.seconds, -math.inf, "gap_limit", priced)


def check_cutoff(bound: float, cutoff: float) -> None:
    """Raise CutoffError if no plan can take less than `cutoff` seconds."""
    if bound >= cutoff and math.isfinite(bound):
        raise CutoffError(
            where="plans of this mesh",
            found=f"at least {bound:.4g} s",
            wanted=f"less than {cutoff:.4g} s, which a plan is known to take",
            remedy="take that plan",
        )


def judged(solution: Solution, bound: float, gap: float) -> Solution:
    """With a bound on all plans; "optimal" only if that proves it."""
    far = solution.seconds - bound > max(gap, 1e-6) * solution.seconds
    status = "gap_limit" if solution.status == "optimal" and far else solution.status
    return replace(solution, bound=min(bound, solution.seconds), status=status)


def _optimism(problem: Problem, priced: PricedProgram) -> float:
    """Seconds by which the program may be dearer than the solver knew: where several uses of a weight part
    before its gradient is summed, it is summed for every micro-batch, on a way that no use had alone."""
    prices = problem.prices
    if prices.step_weight == 1.0:
        return 0.0
    uses = problem.graph.consumers()
    return sum(
        prices.gradient_sync(value.name, value.move)
        for value in priced.values.of.values()
        if value.move is not None
        and not value.leads
        and problem.wiring.is_parameter(value.name)
        and len(uses[value.name]) > 1
    )
