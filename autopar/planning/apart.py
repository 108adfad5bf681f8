"""Which plans can't be told apart, for predictions are wrong by so much: of those the simplest stands.

error           3 % of the seconds that are measured, 6 % of those interpolated, 10 % of those estimated
pure or mixed   that of what the two do differently: what they share is wrong alike; where few laps of what
                was measured scatter by more, twice their standard error
blocks          the same, but 3 % at least: equal ones alike before unlike
mesh            the same, fewer axes before more
stages or none  all of it: they differ in what estimates know least of, bubbles and what overlaps; stages
                that don't promise more by their estimate aren't planned. Of a model that fits on one device
                of a node with fast links both may be wrong by all of it: (1 + error) / (1 - error)
micro-batches   3 %, with as many stages nothing computed again before something, then fewer before more:
                wrong alike
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.core.costs import ESTIMATED_ERROR, INTERPOLATED_ERROR, MEASURED_ERROR
from autopar.core.graph import Call
from autopar.core.program import Program
from autopar.core.strategy import Strategy
from autopar.cost.program.priced_program import PricedProgram
from autopar.planning.estimates import PipelineEstimate
from autopar.results.plan.plan import Alternative

if TYPE_CHECKING:
    from autopar.planning.search import MeshDecision

MEASURED = MEASURED_ERROR
SURE = 2.0  # standard errors of what is told apart: 19 times in 20 it is rightly

IN_VAIN = "which predictions can't tell from nothing"  # why a plan is passed over that promises more


def error_of(measured_share: float, interpolated_share: float = 0.0, scatter: float = 0.0) -> float:
    """Least relative difference of predicted seconds that tells two steps apart.

    It follows from the shares that are measured, whose laps `scatter`, and interpolated."""
    return measured_share * max(MEASURED, scatter) + _guessed(measured_share, interpolated_share)


def _guessed(measured_share: float, interpolated_share: float) -> float:
    estimated_share = 1.0 - measured_share - interpolated_share
    return interpolated_share * INTERPOLATED_ERROR + estimated_share * ESTIMATED_ERROR


def measured_share(priced: PricedProgram) -> float:
    """The part of predicted operator time that rests on measurements."""
    found = priced.operator_prices
    compute = sum(each.compute for each in found)
    return 1.0 - sum(each.missing_seconds for each in found) / compute if compute else 1.0


def interpolated_share(priced: PricedProgram) -> float:
    """The part that rests on measurements of other sizes."""
    found = priced.operator_prices
    compute = sum(each.compute for each in found)
    return sum(each.interpolated_seconds for each in found) / compute if compute else 0.0


def scatter_of(priced: PricedProgram) -> float:
    """How far half of the laps of what is measured lie from their medians, relatively, by their seconds."""
    seconds = total = 0.0
    for call in (call for price in priced.operator_prices for call in price.calls):
        cost = priced.prices.model.cost(call)
        if cost.measured:
            own = cost.forward_seconds + cost.backward_seconds
            seconds, total = seconds + own, total + own * cost.scatter
    return total / seconds if seconds else 0.0


def margin(priced: PricedProgram, other: PricedProgram) -> float:
    """Most by which a simpler `other` may be predicted slower and be taken, relatively; it may be on a mesh
    of fewer axes."""
    share = measured_share(priced)
    guessed = _guessed(share, interpolated_share(priced)) * unlike(priced, other.program)
    return max(share * MEASURED + guessed, SURE * noise(priced, other))


def noise(priced: PricedProgram, other: PricedProgram) -> float:
    """The standard error of what is measured of the seconds between two programs, relatively. Calls that
    both make take none of it."""
    times, calls = Counter[str](), dict[str, Call]()
    for program, sign in ((priced, 1), (other, -1)):
        for call in (call for price in program.operator_prices for call in price.calls):
            times[call.key()] += sign
            calls[call.key()] = call
    model, variance = priced.prices.model, 0.0
    for cost, count in ((model.cost(calls[key]), count) for key, count in times.items() if count):
        variance += (count * cost.noise * (cost.forward_seconds + cost.backward_seconds)) ** 2
    return model.contention * math.sqrt(variance) / priced.seconds if priced.seconds else 0.0


def unlike(priced: PricedProgram, other: Program) -> float:
    """The part of a program's operator time that is spent otherwise than in another."""
    total = alike = 0.0
    for item, price in zip(priced.graph.operators, priced.operator_prices, strict=True):
        total += price.seconds
        if _factors(priced.program.strategies[item.name]) == _factors(other.strategies[item.name]):
            alike += price.seconds
    return 1.0 - alike / total if total else 0.0


def _factors(strategy: Strategy) -> object:
    """Equal for strategies of one mesh that are equal, and for those that share one factor among all
    devices."""
    factors = [option.factor for option in strategy]
    return factors[0] if len(set(factors)) == 1 else tuple(factors)


@dataclass(frozen=True, slots=True)
class Apart:
    """Least differences of seconds by which steps with other stages and micro-batches can be told apart."""

    measured: bool
    is_roomy: bool = False  # whether the model fits on one device of a node with fast links

    @property
    def of_stages(self) -> float:
        """Most by which a step without stages may be predicted slower and be taken, relatively."""
        error = error_of(self.measured)
        return (1 + error) / (1 - error) - 1 if self.is_roomy else error

    def limit(self, choice: PipelineEstimate | MeshDecision, other: PipelineEstimate | MeshDecision) -> float:
        """Seconds below which `choice` is to be preferred to `other`."""
        stages, others = complexity(choice)[0], complexity(other)[0]
        if others == 1 < stages:
            return seconds_of(other) / (1 + self.of_stages)
        if not complexity(choice) < complexity(other):
            return seconds_of(other)
        unstaged = stages == 1 < others
        return seconds_of(other) * (1 + (self.of_stages if unstaged else MEASURED))

    def promised(self, choice: PipelineEstimate, choices: Sequence[PipelineEstimate], cap: float) -> float:
        """Seconds from which on stages beat a `choice` without if they take what they are estimated to; where
        operators are measured estimates say too little."""
        if self.measured:
            return math.inf
        staged = [each for each in choices if each.ranks > 1 == choice.ranks and each.nbytes <= cap]
        return min((self.limit(choice, each) for each in staged), default=math.inf)

    def simplest(self, decisions: Sequence[MeshDecision]) -> MeshDecision:
        """The simplest of those that can't be told from the fastest."""
        fastest = min(decisions, key=seconds_of)
        alike = [each for each in decisions if each.step.seconds <= self.limit(each, fastest)]
        return min(alike, key=lambda each: (complexity(each), each.step.seconds))

    def passed(self, decision: MeshDecision, best: MeshDecision) -> Alternative:
        """Note on a more complicated plan: what it promises beside the simpler one that is taken."""
        kind = f", {decision.step.schedule.kind.value}" if decision.step.schedule else ""
        step = decision.step
        return promise(_name(decision, kind), step.seconds, step.peak_bytes, best.step.seconds)

    def left_out(
        self, choices: Sequence[PipelineEstimate], best: MeshDecision, cap: float
    ) -> list[Alternative]:
        """Note on the best plan of more stages that wasn't made: what it promises at most, by its
        estimate."""
        stages, seconds = best.request.pipeline_ranks, best.step.seconds
        more = [each for each in choices if each.ranks > 1 == stages and each.nbytes <= cap]
        least = min(more, key=seconds_of, default=None)
        if least is None or least.seconds >= seconds:
            return []
        return [promise(_name(least), least.seconds, round(least.nbytes), seconds, by=" by its estimate")]


def _name(choice: PipelineEstimate | MeshDecision, kind: str = "") -> str:
    ranks, recomputes, count = complexity(choice)
    name = f"{ranks} stages, " if ranks > 1 else ""
    return f"{name}{count} micro-batches{kind}{', recomputing' if recomputes else ''}"


def promise(name: str, seconds: float, nbytes: int, taken: float, *, by: str = "") -> Alternative:
    """A plan that is passed over, although it promises less than the seconds of the one that is `taken`."""
    reason = f"promises {1 - seconds / taken:.1%} less{by}, {IN_VAIN}"
    return Alternative(name, seconds, nbytes, feasible=True, reason=reason)


def seconds_of(choice: PipelineEstimate | MeshDecision) -> float:
    """Predicted seconds of a step."""
    return choice.seconds if isinstance(choice, PipelineEstimate) else choice.step.seconds


def complexity(choice: PipelineEstimate | MeshDecision) -> tuple[int, bool, int]:
    """Stages, whether something is computed again, and micro-batches."""
    if isinstance(choice, PipelineEstimate):
        return choice.ranks, choice.recomputes, choice.micro_batches
    return choice.request.pipeline_ranks, choice.step.recomputes, choice.request.micro_batches
