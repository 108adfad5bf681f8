"""One row: the plan, or why there is none, in numbers and a few words."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

import autopar
from autopar.core.gathering import Gathering
from autopar.errors import AutoparError, InfeasibleError
from autopar.planning.apart import IN_VAIN
from autopar.results.plan.plan import Plan
from tests.benchmarks.zoo.rows import Row

TIMES = 10  # a row's limit: what takes longer has failed
NARROW = 0.9  # of the cap: a plan that takes more may have been made slower by it


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """What a row came to. `wall` and `cpu` are seconds of planning, tracing included; `step` of a step.

    `less` is what the best more complicated plan promises to spare, which the simpler one stands for: the
    gap contains it. `binds` is whether memory may have made the plan slower; `failure` is empty for a plan,
    and for a refusal that names the least memory that would do, which `plan` then says.
    """

    name: str
    batch: int
    limit: float
    wall: float
    cpu: float
    plan: str = ""
    gap: float | None = None
    less: float = 0.0
    step: float | None = None
    peak_bytes: int | None = None
    binds: bool = False
    failure: str = ""

    @property
    def distance(self) -> float:
        """How far the best plan that was found is from the bound."""
        return max(0.0, 1.0 - (1.0 - (self.gap or 0.0)) / (1.0 - self.less))

    @property
    def is_late(self) -> bool:
        """Whether it took more processor seconds than its limit, which quiet cores would have needed, too."""
        return self.cpu > self.limit


def answer(row: Row) -> RowAnswer:
    """Plan the row, with all options' defaults but for measuring."""
    wall, cpu = time.perf_counter(), time.process_time()
    model, inputs, loss_fn = row.model.make(row.batch)
    found: Plan | AutoparError
    try:
        found = autopar.plan(model, row.machines.spec, inputs, loss_fn=loss_fn, measure=False)
    except AutoparError as error:
        found = error
        str(error)  # what seeks the least memory that would do
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return told(RowAnswer(row.name, row.batch, row.machines.seconds, wall, cpu), found)


def told(known: RowAnswer, found: Plan | AutoparError) -> RowAnswer:
    """The answer with what was found."""
    if isinstance(found, InfeasibleError) and found.least is not None:
        return replace(known, plan="infeasible", peak_bytes=found.least, binds=True)
    if isinstance(found, AutoparError):
        return replace(known, failure=f"{type(found).__name__}: {found}")
    return replace(
        known,
        plan=words(found),
        gap=found.gap,
        less=passed(found),
        step=found.step_seconds,
        peak_bytes=found.peak_bytes,
        binds=binds(found),
    )


def passed(plan: Plan) -> float:
    """What the best plan that was passed over for a simpler one promises to spare, relatively."""
    least = min(
        (item.step_seconds or plan.step_seconds for item in plan.alternatives if IN_VAIN in item.reason),
        default=plan.step_seconds,
    )
    return max(0.0, 1.0 - least / plan.step_seconds)


def words(plan: Plan) -> str:
    """The plan in about five words: what most work on each axis is, stages and micro-batches."""
    pipeline, said = plan.pipeline, []
    for axis, size in enumerate(plan.mesh.shape):
        work: Counter[str] = Counter()
        for layer in plan.layers:
            work[layer.kinds[axis] or "copies"] += max(1, round(1e9 * layer.compute))
        (first, most), *_ = work.most_common(1)
        mixed = "" if most > NARROW * work.total() else "+"
        said.append(f"{size} {first}{mixed}")
    text = " x ".join(said)
    if pipeline.is_staged:
        text += f", {pipeline.ranks} stages"
    if pipeline.micro_batches > 1:
        text += f", {pipeline.micro_batches} micro-batches"
    if pipeline.is_staged:
        text += f" {pipeline.schedule.value}"
    return text + ", recomputing" * bool(plan.program.recompute)


def binds(plan: Plan) -> bool:
    """Whether memory may have made the plan slower: it holds less than it could, or is nearly full."""
    program = plan.program
    regathers = any(way is Gathering.REGATHER for way in program.gatherings.values())
    full = plan.memory_cap is not None and plan.peak_bytes > NARROW * plan.memory_cap
    return bool(program.recompute or program.offload or regathers or full)
