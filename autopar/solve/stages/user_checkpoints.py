"""What the model itself recomputes in backward: done unless the planner knows better.

Where a memory cap asks for parts to be recomputed, or the user does, those are chosen by recompute.py
and take the place of the model's own; so does what is offloaded. Else the fastest assignment recomputes what
the model checkpoints, as its author asked for, and is priced with it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.core.costs import LinkLike
from autopar.core.graph import Graph
from autopar.core.recompute import Recompute
from autopar.errors import InfeasibleError
from autopar.solve.stages.step import Step, staged, unstaged


def respect(step: Step, *, micro_batches: int, hop: LinkLike, cap: int | None) -> Step:
    """The step with the model's checkpoints, where nothing else is recomputed and they fit."""
    own, graph = step.solution, step.solution.priced.graph
    if not graph.checkpoints or own.program.recompute or own.program.offload:
        return step
    priced = own.priced.remedied(recompute=graph.checkpoints)
    solution = replace(own, priced=priced, held=priced)
    if step.cut is None or step.schedule is None:
        return unstaged(solution, micro_batches)
    try:
        return staged(solution, schedules=[step.schedule], hop=hop, cap=cap)
    except InfeasibleError:  # what a part needs while it is recomputed does not fit
        return step


def notes(graph: Graph, step: Step, recompute: Recompute) -> tuple[str, ...]:
    """Tell in the plan what became of the model's checkpoints."""
    regions, done = graph.checkpoints, step.solution.program.recompute
    if not regions:
        return ()
    if not done:
        why = "activations are offloaded instead" if step.solution.program.offload else "it does not fit"
        why = "--recompute none" if recompute is Recompute.NONE else why
        return (f"what the model checkpoints is kept, not computed again: {why}",)
    if _within(done, regions):
        return (f"computed again in backward: {len(regions)} regions that the model checkpoints",)
    return ("computed again in backward: parts that the planner chose, not those that the model checkpoints",)


def _within(parts: tuple[tuple[int, int], ...], regions: tuple[tuple[int, int], ...]) -> bool:
    """Whether every part is a region, or what a stage has of one."""
    return all(any(low <= first and stop <= high for low, high in regions) for first, stop in parts)
