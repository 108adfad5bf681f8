"""Where the seconds of a step go, as text: a line for each part of it, then how far to trust them."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.core.costs import ESTIMATED_ERROR, INTERPOLATED_ERROR, MEASURED_ERROR
from autopar.results.plan.plan import Plan
from autopar.results.plan.step_parts import StepParts
from autopar.units import show_seconds

LEAST_SHOWN_SHARE = 5e-4  # of the step: parts below that don't change its three digits
# The least and the most that measured steps took of what was predicted, of all pairs in docs/figures.md.
LEAST, MOST = 0.66, 1.63


NAMES = {
    "compute": "computing",
    "recompute": "computing again",
    "communication": "communication",
    "copies": "copies to the host",
    "sums": "sums of gradients",
    "optimizer": "optimizer",
    "hops": "messages between stages",
    "waits": "waiting for stages",
}


def signed(seconds: float) -> str:
    """Seconds more or less than something else takes."""
    return f"{'-' if seconds < 0 else '+'}{show_seconds(abs(seconds))}"


def told_parts(difference: StepParts, *, least: float) -> list[str]:
    """Parts of more than `least` seconds that explain the difference of two steps, the largest first."""
    parts = difference.as_dict()
    names = sorted((name for name in NAMES if abs(parts[name]) > least), key=lambda name: -abs(parts[name]))
    return [f"{signed(parts[name])} {NAMES[name]}" for name in names]


def step_lines(plan: Plan) -> Iterator[str]:
    """The step, and the parts that add up to it."""
    whose = "on an average device" if plan.pipeline.is_staged else "on each device"
    error = f" ± {plan.error:.0%}" if plan.error else ""
    yield f"step      {show_seconds(plan.step_seconds)}{error} predicted, {whose} the sum of"
    parts = [
        (seconds, what) for seconds, what in _parts(plan) if seconds > LEAST_SHOWN_SHARE * plan.step_seconds
    ]
    for seconds, what in parts:
        share = seconds / plan.step_seconds if plan.step_seconds else 0.0
        yield f"{show_seconds(seconds):>17}  {share:6.1%}  {what}"
    if plan.parts.hidden > LEAST_SHOWN_SHARE * plan.step_seconds:
        yield f"          {show_seconds(plan.parts.hidden)} of communication beside it hide behind compute"


def _parts(plan: Plan) -> Iterator[tuple[float, str]]:
    parts = parts_of(plan)
    yield parts.compute, f"operators, of which {plan.measured_share:.0%} are measured"
    yield parts.recompute, "operators that run again in backward, to save memory"
    yield parts.communication, "communication that forward and backward wait for"
    yield parts.copies, "waits for copies to and from host memory"
    yield parts.hops, "waits for messages of other stages"
    yield parts.waits, "waits for stages that still compute"
    yield parts.sums, "sums of gradients, once a step"
    yield parts.optimizer, "the optimizer"
    yield parts.ties, "what the search adds for memory, to choose between equal plans"


def parts_of(plan: Plan) -> StepParts:
    """The parts of the step; of a plan that was saved without them, the known ones."""
    if plan.parts != StepParts():
        return plan.parts
    rest = plan.step_seconds - plan.compute_seconds - plan.communication_seconds
    return StepParts(
        compute=plan.compute_seconds, communication=plan.communication_seconds, waits=max(0.0, rest)
    )


def trust_lines(plan: Plan) -> Iterator[str]:
    """Lines that tell measured from estimated, and how far predictions were off."""
    overlaps = plan.pipeline.is_staged or plan.parts.hidden > 0
    overlap = "" if overlaps else "; nothing is taken to overlap"
    shares = {
        f"measured (± {max(MEASURED_ERROR, plan.scatter):.0%})": plan.measured_share,
        f"interpolated from other sizes (± {INTERPOLATED_ERROR:.0%})": plan.interpolated_share,
        f"estimated (± {ESTIMATED_ERROR:.0%})": 1 - plan.measured_share - plan.interpolated_share,
    }
    told = [f"{share:.0%} {what}" for what, share in shares.items() if share > LEAST_SHOWN_SHARE]
    yield f"trust     operator time is {', '.join(told)}{overlap}"
    yield f"          timed steps took {LEAST:.2f} to {MOST:.2f} times what measured operators had promised;"
    yield "          of estimates that isn't known: autopar compare --measure times strategies here"
