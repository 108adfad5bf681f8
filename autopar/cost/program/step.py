"""What a step of a program costs: what every micro-batch repeats, and what is done once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.convert.moves import effect
from autopar.core.graph import InputKind
from autopar.core.move import Move
from autopar.cost.program.early import early_seconds
from autopar.cost.program.gathering import regathers
from autopar.cost.program.host import host_seconds
from autopar.cost.program.offload import wait_seconds
from autopar.cost.program.recompute import recompute_seconds
from autopar.cost.program.values import Value
from autopar.errors import CheckError

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds on one rank for the whole graph: `forward` and `backward` of one micro-batch, the latter
    with all that is recomputed, both with what they wait for copies to and from the host, and once a step
    the sums of gradients that wait for the last one, with the gathers of weights that are gathered once, and
    the optimizer's `update`. Of `sync` so many seconds are `hidden` behind the last backward pass, and of
    each micro-batch's exchanges so many `beside` what it computes. To call a micro-batch's operators takes a
    GPU's host `calls`, while that computes."""

    forward: float
    backward: float
    sync: float
    update: float
    hidden: float = 0.0
    summed: float = 0.0  # of `sync` what could hide
    beside: float = 0.0
    early: float = 0.0  # of a micro-batch what could hide
    calls: float = 0.0

    @property
    def micro_batch(self) -> float:
        return self.forward + self.backward - self.beside

    def weighted(self, step_weight: float) -> float:
        """Seconds of a micro-batch and `step_weight` times those spent once a step: the objective."""
        return self.micro_batch + step_weight * (self.sync + self.update)

    def of(self, micro_batches: int) -> float:
        """Seconds of a step on one group of ranks, without stages."""
        return micro_batches * self.micro_batch + self.exposed + self.update

    @property
    def exposed_sums(self) -> bool:
        """Whether gradient sums, or exchanges that start early, take longer than the work that could hide
        them."""
        return self.hidden < self.summed or self.beside < self.early

    @property
    def exposed(self) -> float:
        """Seconds of the sums that nothing hides."""
        return self.sync - self.hidden


def step_cost(priced: PricedProgram) -> StepCost:
    """The prices of all that `program` does, summed; raises CheckError if they are not finite."""
    graph, prices, costs = priced.graph, priced.prices, priced.operator_prices
    forward = sum(cost.forward for cost in costs)
    backward = sum(cost.backward for cost in costs)
    parameters = dict.fromkeys(item.name for item in graph.inputs if item.kind is InputKind.PARAMETER)
    used = {name for item in graph.operators for name in item.operands}  # others get no gradient, no update
    sync = summed = 0.0
    update = sum(prices.update(name, priced.program.inputs[name]) for name in parameters if name in used)
    backward += sum(each.seconds for each in regathers(priced))
    for value in priced.values.of.values():
        if value.move is None:
            continue
        if value.leads:
            seconds = prices.gradient_sync(value.name, value.move)
            sync += seconds
            summed += seconds if is_bucketed(value.move) else 0.0
        else:
            before, after = move_seconds(priced, value, name_is_weight=value.name in parameters)
            forward, backward = forward + before, backward + after
    backward += recompute_seconds(priced)
    waits = wait_seconds(priced)
    forward, backward = forward + waits[0], backward + waits[1]
    credited = prices.credit or prices.compute_credit or prices.late_credit
    hidden = 0.0 if credited else min(summed, prices.overlap * sum(cost.behind for cost in costs))
    early, beside = early_seconds(priced)
    room = prices.overlap * sum(cost.compute for cost in costs) - prices.step_weight * hidden
    beside = 0.0 if credited else min(beside, room)
    calls = host_seconds(graph, prices)
    found = StepCost(forward, backward, sync, update, hidden, summed, beside, early, calls)
    if not math.isfinite(found.weighted(1.0)):
        raise CheckError(
            where="plan", found=f"{found.weighted(1.0)} s", wanted="a finite time", remedy="profile again"
        )
    return found


def is_bucketed(move: Move) -> bool:
    """Whether a weight's conversion is an all-reduce of its gradient, which starts when its bucket is full.
    Weights that lie in shards are gathered, and their gradients scattered, while nothing else runs."""
    return effect(move).name == "r_to_b"


def move_seconds(priced: PricedProgram, value: Value, *, name_is_weight: bool) -> tuple[float, float]:
    """Seconds of the conversion that makes a value, forward and backward, for one micro-batch."""
    assert value.move is not None
    before, after = priced.move_parts(value)
    if name_is_weight and is_bucketed(value.move):
        after = priced.prices.gradient_sync(value.name, value.move) - before
    return before, after
