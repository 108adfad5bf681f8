"""Which operator calls are to be measured first: those that decide between the best plans.

    value     how far the predictions of the plans may move, relatively:
              error(call) (most seconds in a plan - SHARED · least seconds in a plan) / step
    density   value by the seconds that measuring takes; the densest come first

What all plans do alike moves all of them alike, and decides nothing but how near the prediction is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.core.costs import ESTIMATED_ERROR, INTERPOLATED_ERROR, OperatorCost
from autopar.core.graph import Call
from autopar.cost.machine.measuring import seconds_to_measure
from autopar.cost.machine.model import CostModel
from autopar.cost.program.priced_program import PricedProgram

SHARED = 0.5  # of the value of what all plans do alike


@dataclass(frozen=True, slots=True)
class PlanCalls:
    """A plan's calls, how often each is made, in a step of so many seconds."""

    calls: Mapping[str, Call]
    times: Mapping[str, int]
    seconds: float

    @staticmethod
    def of(priced: PricedProgram) -> PlanCalls:
        calls: dict[str, Call] = {}
        times: Counter[str] = Counter()
        for price in priced.operator_prices:
            for call in price.calls:
                key = call.key()
                calls[key] = call
                times[key] += 1
        return PlanCalls(calls, times, priced.seconds)


def most_valuable(candidates: Sequence[PlanCalls], model: CostModel) -> list[Call]:
    """The calls of the best plans that aren't measured, the most valuable for their time first."""
    calls = {key: call for each in candidates for key, call in each.calls.items()}
    density = {}
    for key, call in model.missing(calls.values()).items():
        cost = model.cost(call)
        seconds = cost.forward_seconds + cost.backward_seconds
        shares = [each.times.get(key, 0) * seconds / each.seconds for each in candidates if each.seconds]
        value = error_of(cost) * (max(shares, default=0.0) - SHARED * min(shares, default=0.0))
        density[key] = value / seconds_to_measure(call, model.contention * seconds)
    return [calls[key] for key in sorted(density, key=lambda key: (-density[key], key))]


def error_of(cost: OperatorCost) -> float:
    """Relative error of an operator's seconds that aren't measured."""
    return INTERPOLATED_ERROR if cost.interpolated else ESTIMATED_ERROR
