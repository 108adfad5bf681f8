"""Seconds of a step of 1F1B that goes on over the border of steps, in steady state.

    m micro-batches, flushed     [ fill | m slots of the slowest stage | drain | sums, update ]
    unflushed                           [ m slots | sums, update ]

What m more micro-batches take where as many are under way is what a step takes without filling and draining.
Sums of gradients and the update count whole, though other ranks compute meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.core.pipeline import Pipeline
from autopar.core.timeline import StageCost
from autopar.schedules.fill_bubbles import order_of
from autopar.schedules.simulate import simulate

COPIES = 2  # of the weights, of batches that are under way


def unflushed_seconds(pipeline: Pipeline, costs: Sequence[StageCost]) -> float:
    """Predicted seconds of a step in steady state, of one stage a rank."""
    alone = [replace(cost, sync=0.0, update=0.0) for cost in costs]
    count = pipeline.micro_batches
    longer, shorter = (
        simulate(order_of(replace(pipeline, micro_batches=times * count, filling=())), alone).seconds
        for times in (3, 2)
    )
    return longer - shorter + max(cost.sync + cost.update for cost in costs)
