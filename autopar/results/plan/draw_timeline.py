"""A timeline as a picture in plain text, and as a file for a trace viewer.

A column is a slice of time. An action begins with its micro-batch's number (the last digit, where
there is no room for more) and goes on with the mark of its kind; `.` is a rank that waits.

    rank 0  0-1-....0===2-1===..2===        - forward    = backward
    rank 1  ..0-0===1-1===2-2===....

A rank with several stages has a line for each of them, blank while it computes another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.core.schedule import ActionKind
from autopar.core.timeline import Event, EventKind, RankActivity, Timeline
from autopar.errors import InputError
from autopar.results.files.whole_file import write_whole
from autopar.units import show_bytes, show_seconds

TIMELINE_WIDTH = 110  # columns
NARROWEST = 20  # columns of a picture, labels apart
LEAST_ACTION_COLUMNS = 2  # columns of the shortest action: one for its number and one for its mark
BANDS = 8  # more of them, one below the other, nobody reads: then short actions lose their columns
MARKS: dict[EventKind, tuple[str, str]] = {
    ActionKind.FORWARD: ("-", "forward"),
    ActionKind.BACKWARD: ("=", "backward"),
    ActionKind.INPUT_GRADIENT: ("~", "input gradients"),
    ActionKind.WEIGHT_GRADIENT: ("+", "weight gradients"),
    RankActivity.SYNC: ("s", "waits for gradient sums"),
    RankActivity.UPDATE: ("u", "update"),
    RankActivity.RECOMPUTE: ("r", "recomputes"),
    RankActivity.COPIES: ("c", "waits for copies"),
}
WAITING = (RankActivity.SYNC, RankActivity.COPIES)
MICROSECONDS = 1e6  # in a second; the unit of trace files


def timeline_text(timeline: Timeline, *, width: int = TIMELINE_WIDTH) -> str:
    """The timeline as a picture of at most `width` columns, in several bands if it is long.

    Below the picture stand what its marks mean, and how long each rank waits and what it holds.
    Raises InputError if `width` leaves no room for the picture.
    """
    schedule, timeline = timeline.schedule, timeline.coarse
    rows = [
        (rank, stage)
        for rank in range(schedule.ranks)
        for stage in range(schedule.stages)
        if schedule.rank_of(stage) == rank
    ]
    several = schedule.stages_per_rank > 1
    labels = [f"rank {rank} stage {stage}  " if several else f"rank {rank}  " for rank, stage in rows]
    room = width - max(map(len, labels))
    if room < NARROWEST:
        raise InputError(
            where="picture of a timeline",
            found=f"a width of {width} columns",
            wanted=f"at least {width - room + NARROWEST}",
            remedy="draw it wider",
        )
    scale = _columns_per_second(timeline, room)
    lines = dict(zip(labels, [_line(timeline, *row, scale) for row in rows], strict=True))
    return "\n".join([_title(timeline), *_bands(lines, room, scale), *_legend(timeline), *_totals(timeline)])


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Chrome trace format, which ui.perfetto.dev shows; times in microseconds.

    A process is a rank; its threads are what it computes, what it sends to each other rank, and its
    gradient sums. A counter follows the bytes that it holds.
    """
    ranks = range(timeline.schedule.ranks)
    events = [
        *(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in ranks
        ),
        *_threads(timeline),
        *(_complete(event, timeline) for event in timeline.events),
        *(
            {
                "name": "held",
                "ph": "C",
                "pid": rank,
                "ts": held.seconds * MICROSECONDS,
                "args": {"bytes": held.nbytes},
            }
            for rank in ranks
            for held in timeline.held[rank]
        ),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write `perfetto(timeline)` to `path` as JSON, replacing the file at once.

    Raises InputError, leaving what was there, if the file can't be written.
    """
    text = json.dumps(perfetto(timeline), allow_nan=False) + "\n"
    write_whole(path, text, where=f"trace file {path}")


def _columns_per_second(timeline: Timeline, room: int) -> float:
    """Columns for a second, so many that the shortest action has its columns, within BANDS bands."""
    if not (total := timeline.seconds):
        return 0.0
    lengths = [event.stop - event.start for event in timeline.events if event.computes]
    shortest = min((length for length in lengths if length), default=total)
    return min(BANDS * room, max(room, LEAST_ACTION_COLUMNS * total / shortest)) / total


def _line(timeline: Timeline, rank: int, stage: int, scale: float) -> str:
    """All columns of one stage."""
    columns = ["."] * round(timeline.seconds * scale)
    own = [event for event in timeline.events if event.rank == rank]
    for event in [event for event in own if event.kind in WAITING and event.stage == stage]:
        _paint(columns, event, scale, MARKS[event.kind][0])
    for event in [event for event in own if event.computes]:
        number = "" if event.micro_batch is None else str(event.micro_batch)
        _paint(columns, event, scale, MARKS[event.kind][0] if event.stage == stage else " ", number)
    return "".join(columns)


def _paint(columns: list[str], event: Event, scale: float, mark: str, number: str = "") -> None:
    """Fill the event's columns with `mark`, and begin with `number` unless the mark is blank."""
    start, stop = round(event.start * scale), round(event.stop * scale)
    if mark == " ":
        number = ""
    elif len(number) >= stop - start:
        number = number[-1:]
    columns[start:stop] = (number + mark * (stop - start))[: stop - start]


def _bands(lines: dict[str, str], room: int, scale: float) -> Iterator[str]:
    """The lines, each with its label, cut into pieces of `room` columns that stand below each other."""
    margin = max(map(len, lines))
    length = max(map(len, lines.values()))
    for start in range(0, length, room):
        stop = min(start + room, length)
        yield f"{show_seconds(start / scale)} to {show_seconds(stop / scale)}"
        yield from (f"{label:{margin}}{line[start:stop]}".rstrip() for label, line in lines.items())


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return (
        f"{schedule.kind.value}: ranks {schedule.ranks}, stages {schedule.stages}, "
        f"micro-batches {schedule.micro_batches}, {show_seconds(timeline.seconds)} a step"
    )


def _legend(timeline: Timeline) -> Iterator[str]:
    kinds = {event.kind for event in timeline.events}
    marks = [f"{mark} {meaning}" for kind, (mark, meaning) in MARKS.items() if kind in kinds]
    yield "   ".join([*marks, ". waits"])


def _totals(timeline: Timeline) -> Iterator[str]:
    for rank in range(timeline.schedule.ranks):
        peak = timeline.peak_of(rank)
        yield (
            f"rank {rank}  waits {timeline.bubble(rank):.1%}, "
            f"holds at most {show_bytes(peak.nbytes)}, first at {show_seconds(peak.seconds)}"
        )


def _thread(event: Event, timeline: Timeline) -> tuple[int, str]:
    """The number and the name of the thread that shows the event."""
    if event.to_stage is not None:
        to = timeline.schedule.rank_of(event.to_stage)
        return 2 + to, f"sends to rank {to}"
    return (0, "computes") if event.computes else (1, "sums gradients")


def _threads(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, (number, name) in sorted({(event.rank, _thread(event, timeline)) for event in timeline.events}):
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}


def _complete(event: Event, timeline: Timeline) -> dict[str, Any]:
    return {
        "name": str(event),
        "cat": event.kind.name.lower(),
        "ph": "X",
        "ts": event.start * MICROSECONDS,
        "dur": (event.stop - event.start) * MICROSECONDS,
        "pid": event.rank,
        "tid": _thread(event, timeline)[0],
        "args": {"stage": event.stage, "micro_batch": event.micro_batch},
    }
