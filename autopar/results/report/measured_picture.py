"""Predicted against measured: two bands for each strategy that ran, of one scale."""

from __future__ import annotations

from autopar.results.comparison.measured_steps import MeasuredStep, MeasuredSteps
from autopar.results.plan.plan import Plan
from autopar.results.plan.render_plan import TAKEN
from autopar.results.report.figures import (
    Bar,
    Cell,
    FigureTable,
    Picture,
    Piece,
    named,
    nbytes,
    scale,
    seconds,
)
from autopar.units import show_seconds

PREDICTION_TOLERANCE = 1e-6  # of a step: predictions that differ by more are of other plans


def measured_picture(plan: Plan, measured: MeasuredSteps) -> Picture:
    """Picture of predicted and measured steps."""
    every = [value for step in measured.steps for value in (step.step_seconds, step.measured_step_seconds)]
    units = scale(every)
    return Picture(
        "Predicted and measured",
        "Steps of the strategies that ran: predicted above, measured below.",
        tuple(_bar(number, step, measured, units) for number, step in enumerate(measured.steps)),
        (("taken", "predicted"), ("time-backward", "measured")),
        FigureTable(
            ("strategy", "predicted", "measured", "off by", "predicted peak", "measured peak"),
            tuple(_row(number, step, measured) for number, step in enumerate(measured.steps)),
        ),
        _other_plan(plan, measured),
    )


def _other_plan(plan: Plan, measured: MeasuredSteps) -> str:
    """Says so where the plan that ran isn't this one."""
    own = next((step for step in measured.steps if step.name == measured.chosen), None)
    if own is None:
        return "The plan itself didn't run."
    if abs(own.step_seconds - plan.step_seconds) <= PREDICTION_TOLERANCE * plan.step_seconds:
        return ""
    return (
        f"The plan that ran was predicted to take {show_seconds(own.step_seconds)}, "
        f"this one {show_seconds(plan.step_seconds)}: they were planned by other measurements or options."
    )


def _name(step: MeasuredStep, measured: MeasuredSteps) -> str:
    return f"{named(step.name)} ({TAKEN})" if step.name == measured.chosen else named(step.name)


def _bar(number: int, step: MeasuredStep, measured: MeasuredSteps, units: float) -> Bar:
    key = f"measured.steps.{number}"
    guess = seconds(f"{key}.step_seconds", step.step_seconds)
    found = seconds(f"{key}.measured_step_seconds", step.measured_step_seconds)
    pieces = (
        Piece("taken", 0, guess.value * units, f"predicted: {guess.text}", 0, 0.5),
        Piece("time-backward", 0, found.value * units, f"measured: {found.text}", 0.5, 0.5),
    )
    return Bar(_name(step, measured), pieces, figures=(found,))


def _row(number: int, step: MeasuredStep, measured: MeasuredSteps) -> tuple[Cell, ...]:
    key = f"measured.steps.{number}"
    off = step.step_seconds / step.measured_step_seconds - 1 if step.measured_step_seconds else 0.0
    return (
        _name(step, measured),
        seconds(f"{key}.step_seconds", step.step_seconds),
        seconds(f"{key}.measured_step_seconds", step.measured_step_seconds),
        f"{off:+.1%}",
        nbytes(f"{key}.peak_bytes", step.peak_bytes),
        nbytes(f"{key}.measured_peak_bytes", step.measured_peak_bytes),
    )
