"""The frontier of seconds and bytes: what less memory costs.

bytes ^ o---.
      |     o------.
      |            o          a step from each point to the next: in between the faster plan is known
      +------------->  seconds
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.results.plan.frontier import Frontier, Point
from autopar.results.plan.plan import Plan
from autopar.results.report.figures import Cell, FigureTable, Picture, Plot, Spot, nbytes, seconds, share
from autopar.units import show_bytes, show_seconds

ROOM = 0.08  # of a scale, beside the outermost points
FULL = 100.0  # per cent


def frontier_picture(plan: Plan, frontier: Frontier) -> Picture:
    """The points of a frontier, the plan among them."""
    rest = []
    if frontier.infeasible is not None:
        rest.append(f"No plan was found under {show_bytes(frontier.infeasible)}.")
    if frontier.untried:
        rest.append(
            f"Time was over before {frontier.untried} lower cap{'s' if frontier.untried > 1 else ''}."
        )
    return Picture(
        "Time and memory",
        "The fastest plans that were found under lower and lower memory caps, on this mesh, with these "
        "stages and micro-batches.",
        (),
        (("taken", "under this plan's cap"), ("other", "under others")),
        FigureTable(
            ("solved under", "step", "peak memory", "gap", "against the fastest"),
            tuple(_row(number, point, frontier, plan) for number, point in enumerate(frontier.points)),
        ),
        " ".join(rest),
        plot=_plot(frontier, plan),
    )


def _row(number: int, point: Point, frontier: Frontier, plan: Plan) -> tuple[Cell, ...]:
    key, fastest = f"frontier.points.{number}", frontier.points[0].step_seconds
    cap = "no cap" if point.memory_cap is None else f"a cap of {show_bytes(point.memory_cap)}"
    return (
        f"{cap}, as this plan" if is_own(point, plan) else cap,
        seconds(f"{key}.step_seconds", point.step_seconds),
        nbytes(f"{key}.peak_bytes", point.peak_bytes),
        share(f"{key}.gap", point.gap, 2),
        f"{point.step_seconds / fastest - 1:+.1%}" if fastest else "",
    )


def is_own(point: Point, plan: Plan) -> bool:
    """Whether a point has the plan's cap."""
    return point.memory_cap == plan.memory_cap


def _plot(frontier: Frontier, plan: Plan) -> Plot:
    points = frontier.points
    across = _Scale([point.step_seconds for point in points])
    upwards = _Scale([float(point.peak_bytes) for point in points])
    return Plot(
        tuple(_spots(points, plan, across, upwards)),
        "seconds of a step",
        "bytes of a device, at the peak",
        tuple((across.at(value), show_seconds(value)) for value in across.ends),
        tuple((FULL - upwards.at(value), show_bytes(value)) for value in upwards.ends),
    )


def _spots(points: tuple[Point, ...], plan: Plan, across: _Scale, upwards: _Scale) -> Iterator[Spot]:
    for point in points:
        title = f"{show_seconds(point.step_seconds)}, {show_bytes(point.peak_bytes)}"
        top = FULL - upwards.at(point.peak_bytes)
        yield Spot(across.at(point.step_seconds), top, "taken" if is_own(point, plan) else "other", title)


class _Scale:
    """From the least to the most of some values, with room beside them; `ends` are these two."""

    def __init__(self, values: list[float]) -> None:
        low, high = min(values), max(values)
        self.ends = (low,) if low == high else (low, high)
        room = ROOM * (high - low) or 1.0
        self.low, self.length = low - room, high - low + 2 * room

    def at(self, value: float) -> float:
        """Where a value stands, in per cent."""
        return round(FULL * (value - self.low) / self.length, 2)
