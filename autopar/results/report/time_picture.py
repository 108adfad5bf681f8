r"""A step over time, and the bytes that devices hold meanwhile.

rank 0   |FF..BB..|u|      a bar for each stage of a rank; what is blank, waits
held     /--\__/-\__       a curve for each rank, of one scale

Without stages there is a bar of what a device computes, and one of the sums of gradients beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.core.schedule import ActionKind
from autopar.core.timeline import Event, EventKind, HeldBytes, Phase, RankActivity, Timeline
from autopar.results.plan.plan import Plan, Stage
from autopar.results.report.figures import (
    WHOLE,
    Bar,
    Cell,
    FigureTable,
    Picture,
    Piece,
    named,
    nbytes,
    seconds,
)
from autopar.units import show_bytes, show_seconds

MOST_DRAWN_EVENTS = 4000  # events that are drawn
NARROW = 1.0  # of WHOLE: operators that take less are drawn as one
POINTS = 250  # of a curve
MOST_TABLE_MOMENTS = 10  # moments that a table shows
COLOURS: dict[EventKind, tuple[str, str]] = {
    ActionKind.FORWARD: ("time-forward", "forward"),
    RankActivity.RECOMPUTE: ("part-recompute", "forward again, to save memory"),
    ActionKind.BACKWARD: ("time-backward", "backward"),
    ActionKind.INPUT_GRADIENT: ("time-input", "gradients of inputs"),
    ActionKind.WEIGHT_GRADIENT: ("time-weight", "gradients of weights"),
    RankActivity.COPIES: ("part-waits", "waits for copies"),
    RankActivity.SYNC: ("part-sums", "sums of gradients"),
    RankActivity.UPDATE: ("part-optimizer", "the optimizer"),
}
PHASES = {
    Phase.FORWARD: "forward",
    Phase.RECOMPUTE: "forward again, to save memory",
    Phase.BACKWARD: "backward",
    Phase.COPIES: "waits for copies",
    Phase.SUMS: "sums of gradients that nothing hides",
    Phase.OPTIMIZER: "the optimizer",
}


def time_picture(plan: Plan, timeline: Timeline) -> Picture:
    """Picture of each stage's computing and its rank's waits, or of the phases of a single device."""
    units = WHOLE / timeline.seconds if timeline.seconds else 0.0
    shown = [event for event in timeline.events if event.kind in COLOURS]
    if not plan.pipeline.is_staged:
        shown = _joined(shown, NARROW / units if units else 0.0)
        if len(shown) > MOST_DRAWN_EVENTS:
            shown = _joined(shown, timeline.seconds)
    drawn, rest = shown[:MOST_DRAWN_EVENTS], ""
    if len(shown) > MOST_DRAWN_EVENTS:
        rest = f"Only the first {MOST_DRAWN_EVENTS} of {len(shown)} actions are drawn."
    schedule = timeline.schedule
    kinds = {event.kind for event in drawn}
    if plan.pipeline.is_staged:
        bars = tuple(_of_stages(plan, timeline, drawn, units))
        about = (
            f"{schedule.kind.value} with {schedule.micro_batches} micro-batches; "
            "a stage waits where its line is blank."
        )
    else:
        bars = tuple(_of_one(drawn, units))
        several = (
            f", its {schedule.micro_batches} micro-batches in turn" if schedule.micro_batches > 1 else ""
        )
        about = f"What each device does, one after the other{several}; all devices do the same."
    return Picture(
        "The step over time",
        about,
        bars,
        tuple(colour for kind, colour in COLOURS.items() if kind in kinds),
        _stages(plan) if plan.pipeline.is_staged else _phases(plan),
        rest,
    )


def _of_stages(plan: Plan, timeline: Timeline, drawn: Sequence[Event], units: float) -> Iterator[Bar]:
    for rank in range(plan.pipeline.ranks):
        for stage in plan.pipeline.stages_of(rank):
            pieces = (_piece(event, units) for event in drawn if (event.rank, event.stage) == (rank, stage))
            waits = f"waits {timeline.bubble(rank):.1%}"
            yield Bar(f"rank {rank}, stage {stage}", tuple(pieces), figures=(waits,))


def _of_one(drawn: Sequence[Event], units: float) -> Iterator[Bar]:
    sums = [event for event in drawn if event.kind is RankActivity.SYNC]
    own = [event for event in drawn if event.kind is not RankActivity.SYNC]
    for name, events in (("operators and the optimizer", own), ("sums of gradients", sums)):
        if events:
            total = show_seconds(sum(event.stop - event.start for event in events))
            yield Bar(name, tuple(_piece(event, units) for event in events), figures=(total,))


def _piece(event: Event, units: float) -> Piece:
    colour, meaning = COLOURS[event.kind]
    what = named(event.label) if event.label else meaning
    part = "" if event.micro_batch is None else f" of micro-batch {event.micro_batch}"
    when = f"{show_seconds(event.start)} to {show_seconds(event.stop)}"
    return Piece(colour, event.start * units, (event.stop - event.start) * units, f"{what}{part}: {when}")


def _joined(events: Sequence[Event], narrow: float) -> list[Event]:
    """The events, neighbours of one kind as one where both take less than `narrow` seconds."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        alike = last and (event.kind, event.micro_batch) == (last.kind, last.micro_batch)
        if last and alike and event.label and max(_length(event), _length(last)) < narrow:
            found[-1] = Event(0, 0, event.micro_batch, event.kind, last.start, event.stop)
        else:
            found.append(event)
    return found


def _length(event: Event) -> float:
    return event.stop - event.start


def _stages(plan: Plan) -> FigureTable:
    headings = ("stage", "rank", "layers", "operators", "forward and backward", "memory")
    return FigureTable(headings, tuple(_stage(number, stage) for number, stage in enumerate(plan.stages)))


def _stage(number: int, stage: Stage) -> tuple[Cell, ...]:
    both = seconds(f"pipeline.stage_seconds.{number}", stage.forward + stage.backward)
    layers = named(stage.first if stage.first == stage.last else f"{stage.first} … {stage.last}")
    held = nbytes(f"pipeline.stage_bytes.{number}", stage.nbytes)
    return str(number), str(stage.rank), layers, str(stage.operators), both, held


def _phases(plan: Plan) -> FigureTable:
    rows: list[tuple[Cell, ...]] = []
    for phase, meaning in PHASES.items():
        own = [moment for moment in plan.moments if moment.phase is phase]
        times = 1 if phase.is_once else plan.pipeline.micro_batches
        total = times * sum(moment.seconds for moment in own)
        if total:
            share = f"{total / (plan.step_seconds or 1):.1%}"
            rows.append((meaning, show_seconds(total), share, show_bytes(max(each.nbytes for each in own))))
    return FigureTable(("phase", "seconds", "of the step", "memory at most"), tuple(rows))


def memory_picture(plan: Plan, timeline: Timeline) -> Picture:
    """Picture of the bytes on each rank over time."""
    most = timeline.peak.nbytes or 1
    bars = tuple(_held(rank, plan, timeline, most) for rank in range(timeline.schedule.ranks))
    whose = "a device of each rank holds" if plan.pipeline.is_staged else "each device holds"
    cap = f" Its cap is {show_bytes(plan.memory_cap)}." if plan.memory_cap is not None else ""
    return Picture(
        "Memory over time",
        f"Bytes that {whose} during the step; the whole height is {show_bytes(most)}.{cap}",
        bars,
        (
            ("lasts", "there all step: weights, optimizer state, the batch"),
            ("held", "beside it: gradients, and what operators and backward need"),
        ),
        _peaks(timeline) if plan.pipeline.is_staged else _fullest(plan),
    )


def _held(rank: int, plan: Plan, timeline: Timeline, most: int) -> Bar:
    peak, least = timeline.peak_of(rank), min(held.nbytes for held in timeline.held[rank])
    return Bar(
        f"rank {rank}" if plan.pipeline.is_staged else "each device",
        (Piece("lasts", 0, WHOLE, f"all step: {show_bytes(least)}", 1 - least / most, least / most),),
        figures=(show_bytes(peak.nbytes),),
        curve=_curve(timeline.held[rank], timeline.seconds, most),
    )


def _peaks(timeline: Timeline) -> FigureTable:
    peaks = [timeline.peak_of(rank) for rank in range(timeline.schedule.ranks)]
    rows = tuple((str(peak.rank), show_bytes(peak.nbytes), show_seconds(peak.seconds)) for peak in peaks)
    return FigureTable(("rank", "peak", "first at"), rows)


def _fullest(plan: Plan) -> FigureTable:
    """The operators that run when memory is fullest."""
    order = sorted(enumerate(plan.moments), key=lambda item: -item[1].nbytes)
    rows: list[tuple[Cell, ...]] = []
    for number, moment in order[:MOST_TABLE_MOMENTS]:
        layer = None if moment.layer is None else plan.layers[moment.layer]
        name = named(layer.module or layer.name) if layer else PHASES[moment.phase]
        took = seconds(f"moments.{number}.seconds", moment.seconds)
        rows.append((name, moment.phase.value, took, nbytes(f"moments.{number}.bytes", moment.nbytes)))
    left = len(order) - len(rows)
    rest = f"The fullest moments; {left} others hold no more." if left else ""
    return FigureTable(("operator", "phase", "seconds", "memory at most"), tuple(rows), rest)


def _curve(held: tuple[HeldBytes, ...], length: float, most: int) -> tuple[tuple[float, float], ...]:
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
