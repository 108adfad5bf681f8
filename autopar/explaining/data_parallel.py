"""Why not plain data parallelism, in one sentence: what it would take, and where its seconds go."""

from __future__ import annotations

from dataclasses import replace

from autopar.explaining.asked import OVER, REFUSED, AskedPlan, reason_of
from autopar.explaining.constraints import flag
from autopar.planning.asked.options import NARROWING
from autopar.results.difference.difference import difference
from autopar.results.plan.plan import Plan
from autopar.results.plan.plan_words import gap_of
from autopar.results.plan.render_step import told_parts
from autopar.units import show_bytes, show_seconds

BATCH = "batch"
PLAIN = {"force": BATCH, "stages": 1, "micro_batches": 1, "mesh": None, "schedule": None, "memory": None}
LEAST_TOLD_SHARE = 0.1  # of the difference: parts that explain less are left out


def why_not(asked: AskedPlan, plan: Plan) -> str:
    """The sentence about plain data parallelism beside a plan."""
    if len(plan.parameter_bytes) == 1:
        return "There is one device: nothing to share the samples with."
    if is_data_parallel(plan):
        return "This is plain data parallelism: every operator with products splits the samples alone."
    plain = asked.saying(**PLAIN)
    if plain.is_over:
        return f"Plain data parallelism wasn't planned: {OVER}."
    plain = plain.hurried()
    try:
        other = replace(plain, cluster=replace(plain.cluster, memory=None)).plan()
    except REFUSED as error:
        return f"Plain data parallelism has no plan: {reason_of(error)}."
    if plan.memory_cap is not None and other.peak_bytes > plan.memory_cap:
        needs, cap = show_bytes(other.peak_bytes), show_bytes(plan.memory_cap)
        return f"Plain data parallelism doesn't fit: it needs {needs} a device, and the cap is {cap}."
    return compared(plan, other, said=said_of(asked, plan))


def said_of(asked: AskedPlan, plan: Plan) -> str:
    """Options that were asked for and exclude plain data parallelism, as flags; "" if none."""
    names = [name for name in NARROWING if name in PLAIN and asked.options.get(name) is not None]
    cut = plan.pipeline.is_staged or plan.pipeline.micro_batches > 1
    told = [name for name in names if name not in ("stages", "micro_batches", "schedule") or cut]
    return ", ".join(flag(name, asked.options[name]) for name in told)


def is_data_parallel(plan: Plan) -> bool:
    """Whether all operators with products split the samples, on every axis, in one stage at once."""
    heavy = [layer for layer in plan.layers if layer.flops]
    whole = not plan.pipeline.is_staged and plan.pipeline.micro_batches == 1
    return whole and bool(heavy) and all(set(layer.kinds) == {BATCH} for layer in heavy)


def compared(plan: Plan, other: Plan, *, said: str = "") -> str:
    """The sentence that compares two steps by their parts, where `said` are options against the other."""
    more = other.step_seconds - plan.step_seconds
    share = abs(more) / plan.step_seconds if plan.step_seconds else 0.0
    told = told_parts(difference(plan, other).parts, least=LEAST_TOLD_SHARE * abs(more))
    text = f"Plain data parallelism is predicted to take {show_seconds(other.step_seconds)} a step, "
    text += f"{show_seconds(abs(more))} ({share:.0%}) {'more' if more >= 0 else 'less'}"
    text += f": {', '.join(told)}" if told else ""
    if more < 0:
        text += f"; it isn't taken because {_reason(plan, -more, said)}"
    return f"{text}."


def _reason(plan: Plan, less: float, said: str) -> str:
    """Why plain data parallelism isn't taken although it takes so many seconds less."""
    if said:
        return f"of {said}"
    if less <= plan.gap * plan.step_seconds:
        return f"the search, whose gap is {gap_of(plan.gap)}, hadn't found it"
    return "predictions can't tell the two apart"
