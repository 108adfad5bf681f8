"""The step as a bar of its parts, and the strategies beside it as bars of one scale."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.results.plan.plan import ONE_DEVICE, Alternative, Plan
from autopar.results.plan.render_plan import TAKEN, reason_of
from autopar.results.plan.render_step import LEAST_SHOWN_SHARE, parts_of
from autopar.results.plan.step_parts import StepParts
from autopar.results.report.figures import (
    Bar,
    Cell,
    Figure,
    FigureTable,
    Picture,
    Piece,
    named,
    nbytes,
    scale,
    seconds,
)

MEANINGS = {
    "compute": "operators",
    "recompute": "operators again, to save memory",
    "communication": "communication that is waited for",
    "copies": "copies to and from host memory",
    "hops": "messages of other stages",
    "waits": "stages that still compute",
    "sums": "sums of gradients, once a step",
    "optimizer": "the optimizer",
    "ties": "what the search adds for memory, to choose between equal plans",
}


def step_picture(plan: Plan) -> Picture:
    """Where the seconds of the step go."""
    parts = parts_of(plan)
    least = LEAST_SHOWN_SHARE * plan.step_seconds
    found = {name: value for name, value in parts.as_dict().items() if name in MEANINGS and value > least}
    whose = "an average device" if plan.pipeline.is_staged else "each device"
    rows: list[tuple[Cell, ...]] = [
        (MEANINGS[name], _part(plan, name, value), f"{value / (plan.step_seconds or 1):.1%}")
        for name, value in found.items()
    ]
    rows.append(("the step", seconds("step_seconds", plan.step_seconds), "100.0%"))
    if parts.hidden:
        rows.append(("hidden behind compute, beside it", seconds("parts.hidden", parts.hidden), ""))
    bar = Bar("step", tuple(_pieces(found, scale([sum(found.values())]))))
    return Picture(
        "Where the step goes",
        f"Seconds of {whose}, which add up to the step.",
        (bar,),
        tuple((f"part-{name}", MEANINGS[name]) for name in found),
        FigureTable(("part", "seconds", "of the step"), tuple(rows)),
        whole=True,
    )


def _part(plan: Plan, name: str, value: float) -> Cell:
    """A part's figure; where a plan was saved before its parts were, what is known of them in words."""
    figure = seconds(f"parts.{name}", value)
    return figure if plan.parts != StepParts() else figure.text


def _pieces(parts: dict[str, float], units: float) -> Iterator[Piece]:
    start = 0.0
    for name, value in parts.items():
        yield Piece(f"part-{name}", start, value * units, f"{MEANINGS[name]}: {seconds('', value).text}")
        start += value * units


def strategies_picture(plan: Plan) -> Picture | None:
    """Other strategies beside the plan, if there are any."""
    others = [*([("serial", plan.serial)] if plan.serial else [])]
    others += [(f"alternatives.{number}", item) for number, item in enumerate(plan.alternatives)]
    if not others:
        return None
    units = scale([plan.step_seconds, *(item.step_seconds or 0.0 for _, item in others)])
    own = seconds("step_seconds", plan.step_seconds), nbytes("peak_bytes", plan.peak_bytes)
    taken = Piece("taken", 0, plan.step_seconds * units, f"{TAKEN}: {own[0].text}")
    rows = [_row(key, item, plan) for key, item in others]
    return Picture(
        "Strategies beside it",
        f"Predicted steps: the plan, {ONE_DEVICE} by itself, and pure strategies on the same devices.",
        (Bar(TAKEN, (taken,), figures=own[:1]), *(_bar(key, item, plan, units) for key, item in others)),
        (("taken", TAKEN), ("other", "fits in memory"), ("unfit", "exceeds the memory cap")),
        FigureTable(("strategy", "step", "peak memory", "against it", ""), ((TAKEN, *own, "", ""), *rows)),
    )


def _bar(key: str, item: Alternative, plan: Plan, units: float) -> Bar:
    name, reason = named(item.name), reason_of(item, plan)
    if item.step_seconds is None:
        return Bar(name, words=reason, figures=("no plan",))
    figure = seconds(f"{key}.step_seconds", item.step_seconds)
    colour = "other" if item.feasible else "unfit"
    piece = Piece(colour, 0, item.step_seconds * units, f"{name}: {figure.text}")
    return Bar(name, (piece,), reason, (figure,))


def _row(key: str, item: Alternative, plan: Plan) -> tuple[Cell, ...]:
    reason = reason_of(item, plan)
    if item.step_seconds is None or item.peak_bytes is None:
        return named(item.name), "", "", "", reason
    more = item.step_seconds / plan.step_seconds - 1 if plan.step_seconds else 0.0
    step: Figure = seconds(f"{key}.step_seconds", item.step_seconds)
    return named(item.name), step, nbytes(f"{key}.peak_bytes", item.peak_bytes), f"{more:+.1%}", reason
