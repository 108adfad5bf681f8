r"""The stages of a pipeline over time, and the bytes that its ranks hold meanwhile.

rank 0   |FF..BB..|u|      a bar for each stage of a rank; what is blank, waits
held     /--\__/-\__       a curve for each rank, of one scale
"""

from __future__ import annotations

from autopar.core.schedule import ActionKind
from autopar.core.timeline import Beside, EventKind, Held, Timeline
from autopar.results.plan import Plan, Stage
from autopar.results.report.figures import WHOLE, Bar, Cell, Picture, Piece, Table, named, nbytes, seconds
from autopar.units import show_bytes, show_seconds

MOST = 4000  # events that are drawn
POINTS = 250  # of a curve
COLOURS: dict[EventKind, tuple[str, str]] = {
    ActionKind.FORWARD: ("time-forward", "forward"),
    ActionKind.BACKWARD: ("time-backward", "backward"),
    ActionKind.INPUT_GRADIENT: ("time-input", "gradients of inputs"),
    ActionKind.WEIGHT_GRADIENT: ("time-weight", "gradients of weights"),
    Beside.SYNC: ("part-communication", "sums of gradients"),
    Beside.UPDATE: ("time-update", "the optimizer"),
}


def time_picture(plan: Plan, timeline: Timeline) -> Picture:
    """When each stage computes, and what its rank waits."""
    shown = [event for event in timeline.events if event.kind in COLOURS]
    drawn, rest = shown[:MOST], ""
    if len(shown) > MOST:
        rest = f"Only the first {MOST} of {len(shown)} actions are drawn."
    units = WHOLE / timeline.seconds if timeline.seconds else 0.0
    bars = []
    for rank in range(plan.pipeline.ranks):
        for stage in plan.pipeline.stages_of(rank):
            pieces = tuple(
                Piece(
                    COLOURS[event.kind][0],
                    event.start * units,
                    (event.stop - event.start) * units,
                    f"{COLOURS[event.kind][1]}"
                    + ("" if event.micro_batch is None else f" of micro-batch {event.micro_batch}")
                    + f": {show_seconds(event.start)} to {show_seconds(event.stop)}",
                )
                for event in drawn
                if (event.rank, event.stage) == (rank, stage)
            )
            waits = f"waits {timeline.bubble(rank):.1%}"
            bars.append(Bar(f"rank {rank}, stage {stage}", pieces, figures=(waits,)))
    schedule = timeline.schedule
    kinds = {event.kind for event in drawn}
    return Picture(
        "The step over time",
        f"{schedule.kind.value} with {schedule.micro_batches} micro-batches; "
        "a stage waits where its line is blank.",
        tuple(bars),
        tuple(colour for kind, colour in COLOURS.items() if kind in kinds),
        _stages(plan),
        rest,
    )


def _stages(plan: Plan) -> Table:
    headings = ("stage", "rank", "layers", "operators", "forward and backward", "memory")
    return Table(headings, tuple(_stage(number, stage) for number, stage in enumerate(plan.stages)))


def _stage(number: int, stage: Stage) -> tuple[Cell, ...]:
    both = seconds(f"pipeline.stage_seconds.{number}", stage.forward + stage.backward)
    layers = named(stage.first if stage.first == stage.last else f"{stage.first} … {stage.last}")
    held = nbytes(f"pipeline.stage_bytes.{number}", stage.nbytes)
    return str(number), str(stage.rank), layers, str(stage.operators), both, held


def memory_picture(timeline: Timeline) -> Picture:
    """What each rank holds over time."""
    most = timeline.peak.nbytes or 1
    ranks = range(timeline.schedule.ranks)
    peaks = [timeline.peak_of(rank) for rank in ranks]
    bars = tuple(
        Bar(
            f"rank {peak.rank}",
            figures=(show_bytes(peak.nbytes),),
            curve=_curve(timeline.held[peak.rank], timeline.seconds, most),
        )
        for peak in peaks
    )
    rows = tuple((str(peak.rank), show_bytes(peak.nbytes), show_seconds(peak.seconds)) for peak in peaks)
    return Picture(
        "Memory over time",
        f"Bytes that a device of each rank holds during the step; a line is {show_bytes(most)} high.",
        bars,
        (("held", "weights, gradients, optimizer state, and what waits for backward"),),
        Table(("rank", "peak", "first at"), rows),
    )


def _curve(held: tuple[Held, ...], length: float, most: int) -> tuple[tuple[float, float], ...]:
    """The outline of what is held: the most in each of POINTS slices of the step."""
    tops = [0.0] * POINTS
    for entry, after in zip(held, [*(each.seconds for each in held[1:]), length], strict=True):
        first = min(int(entry.seconds / length * POINTS), POINTS - 1) if length else 0
        last = min(int(after / length * POINTS), POINTS - 1) if length else 0
        for slice_ in range(first, max(first, last) + 1):
            tops[slice_] = max(tops[slice_], entry.nbytes / most)
    outline = [(0.0, float(WHOLE))]
    for number, top in enumerate(tops):
        height = round(WHOLE * (1 - top), 1)
        outline += [(WHOLE * number / POINTS, height), (WHOLE * (number + 1) / POINTS, height)]
    return (*outline, (float(WHOLE), float(WHOLE)))
