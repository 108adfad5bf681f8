"""A schedule drawn action by action, as in the docstrings of its generator."""

from __future__ import annotations

from autopar.core.schedule import Overlap, Schedule
from autopar.core.timeline import StageCost
from autopar.schedules.simulate import simulate

CELL = 4  # columns of a time step


def drawing(schedule: Schedule) -> str:
    """A line per rank and a cell per time step, F, I and W taking one; `+` ties a pair together."""
    timeline = simulate(
        schedule, [StageCost(forward=1, input_gradient=1, weight_gradient=1)] * schedule.stages
    )
    paired = {str(slot.forward) for order in schedule.orders for slot in order if isinstance(slot, Overlap)}
    lines = []
    for rank in range(schedule.ranks):
        line = ""
        for event in timeline.events:
            if event.rank == rank and event.computes:
                line = line.ljust(int(event.start) * CELL)
                name = f"{event}+" if str(event) in paired else str(event)
                line += name.ljust(int(event.stop - event.start) * CELL - 1, "-")
                line = line.ljust(int(event.stop) * CELL)
        lines.append(f"{rank}  {line.rstrip().rstrip('-')}")
    return "\n".join(lines)
