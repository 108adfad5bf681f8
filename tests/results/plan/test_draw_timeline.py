"""Timelines drawn: goldens of the text, and a trace file that reads back as what was simulated."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings

from autopar.core.schedule import ActionKind, Schedule, ScheduleKind
from autopar.core.timeline import RankActivity, StageCost, Timeline
from autopar.errors import InputError
from autopar.results.plan import draw_timeline
from autopar.results.plan.draw_timeline import perfetto, timeline_text, write_trace
from autopar.schedules.orders import build_schedule
from autopar.schedules.simulate import Receives, simulate
from tests.schedules.test_simulate import cases


def example(kind: ScheduleKind, ranks: int, stages: int, micro_batches: int) -> Timeline:
    schedule = build_schedule(kind, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches)
    cost = StageCost(
        forward=1e-3,
        input_gradient=1e-3,
        weight_gradient=1e-3,
        send_output=5e-4,
        send_gradient=5e-4,
        sync=2e-3,
        update=1e-3,
        state=10**9,
        kept=10**8,
        kept_for_weight=4 * 10**7,
    )
    return simulate(schedule, [cost] * schedule.stages)


def test_1f1b_as_text() -> None:
    assert_expected_inline(
        timeline_text(example(ScheduleKind.ONE_F_ONE_B, 3, 1, 4), width=80),
        """\
1f1b: ranks 3, stages 3, micro-batches 4, 25.5 ms a step
0 ns to 25.5 ms
rank 0  0--1--2-.................0=====3--...1====......2=====....3=====sssssuuu
rank 1  ....0--.1--.......0=====.2--..1====..3--.2=====....3====ssssssuuu.......
rank 2  ........0--0=====.1--1=====...2-2=====...3--3====ssssssuuu..............
- forward   = backward   s waits for gradient sums   u update   . waits
rank 0  waits 49.0%, holds at most 1.3 GB, first at 2 ms
rank 1  waits 49.0%, holds at most 1.2 GB, first at 3 ms
rank 2  waits 49.0%, holds at most 1.1 GB, first at 3 ms""",
    )


def test_the_modules_picture_is_1f1b() -> None:
    schedule = build_schedule(ScheduleKind.ONE_F_ONE_B, ranks=2, micro_batches=3)
    text = timeline_text(simulate(schedule, [StageCost(1, 1, 1)] * 2), width=32)
    rows = [line for line in text.splitlines() if line.startswith("rank ") and " waits " not in line]
    assert len(rows) == 2 and all(row in (draw_timeline.__doc__ or "") for row in rows)


def test_several_stages_per_rank_as_text() -> None:
    assert_expected_inline(
        timeline_text(example(ScheduleKind.ZBV, 2, 2, 3)),
        """\
zbv: ranks 2, stages 4, micro-batches 3, 25.5 ms a step
0 ns to 25.5 ms
rank 0 stage 0  0---1--2---....                      ....0~~0+++           1~~~1++2~~~2+++sssssssuuuu   ......
rank 0 stage 3             ....0--0~~~0+++1--1~~~1+++....       2---2~~2+++               .......    uuu......
rank 1 stage 1  ......0--    1---   ....       2---0~~~0++           1~~~    2~~~1++    2+++...ssssssssuuu
rank 1 stage 2  ......   0---    1--....0~~~0++           2---1~~~1++    2~~~       2+++    sss........   uuuu
- forward   ~ input gradients   + weight gradients   s waits for gradient sums   u update   . waits
rank 0  waits 21.6%, holds at most 2.4 GB, first at 4 ms
rank 1  waits 21.6%, holds at most 2.4 GB, first at 4.5 ms""",
    )


def test_a_long_timeline_goes_on_below() -> None:
    assert_expected_inline(
        timeline_text(example(ScheduleKind.ZB1P, 2, 1, 12), width=60),
        """\
zb1p: ranks 2, stages 2, micro-batches 12, 42 ms a step
0 ns to 26 ms
rank 0  0-1-....0~0+2-1~1+3-2~2+4-3~3+5-4~4+6-5~5+7-6~6+8-7~
rank 1  ...0-0~1-1~0+..2-2~1+3-3~2+4-4~3+5-5~4+6-6~5+7-7~6+8
26 ms to 42 ms
rank 0  7+9-8~8+0-9~9+1-0~0+..1~1+ssssuu
rank 1  -8~7+9-9~8+0-0~9+1-1~0+1+ssssuu.
- forward   ~ input gradients   + weight gradients   s waits for gradient sums   u update   . waits
rank 0  waits 11.9%, holds at most 1.2 GB, first at 1 ms
rank 1  waits 11.9%, holds at most 1.14 GB, first at 3.5 ms""",
    )


def test_a_step_of_no_length_has_no_picture() -> None:
    schedule = build_schedule(ScheduleKind.GPIPE, ranks=1, micro_batches=1)
    assert_expected_inline(
        timeline_text(simulate(schedule, [StageCost(0, 0, 0)])),
        """\
gpipe: ranks 1, stages 1, micro-batches 1, 0 ns a step
- forward   = backward   . waits
rank 0  waits 0.0%, holds at most 0 B, first at 0 ns""",
    )


def test_a_width_without_room_is_refused() -> None:
    with pytest.raises(InputError, match="found a width of 12 columns, wanted at least 28"):
        timeline_text(example(ScheduleKind.GPIPE, 2, 1, 4), width=12)


@settings(max_examples=100)
@given(cases())
def test_no_line_is_too_wide_and_each_band_has_every_row(
    case: tuple[Schedule, list[StageCost], Receives],
) -> None:
    schedule, costs, receives = case
    timeline = simulate(schedule, costs, receives=receives)
    lines = timeline_text(timeline, width=90).splitlines()
    rows = [line for line in lines if line.startswith("rank ") and " waits " not in line]
    bands = [line for line in lines if line[0].isdigit() and " to " in line]
    assert len(rows) == len(bands) * schedule.stages
    assert all(len(line) <= 90 for line in rows)


# -- trace files ---------------------------------------------------------------------------------------------


def test_a_trace_file_reads_back_as_the_timeline(tmp_path: Path) -> None:
    timeline = example(ScheduleKind.DUALPIPEV, 2, 2, 4)
    path = tmp_path / "step.json"
    write_trace(timeline, path)
    assert list(tmp_path.iterdir()) == [path]
    trace = json.loads(path.read_text())
    assert trace == perfetto(timeline)
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = sorted((event["pid"], event["name"], event["ts"], event["dur"]) for event in complete)
    wanted = sorted(
        (event.rank, str(event), event.start * 1e6, (event.stop - event.start) * 1e6)
        for event in timeline.events
    )
    assert found == wanted
    staged = (*ActionKind, RankActivity.SEND, RankActivity.SYNC, RankActivity.UPDATE)
    assert {event["cat"] for event in complete} == {kind.name.lower() for kind in staged}
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == 1]
    assert [(event["ts"], event["args"]["bytes"]) for event in counters] == [
        (held.seconds * 1e6, held.nbytes) for held in timeline.held[1]
    ]


def test_every_thread_has_a_name_and_does_one_thing_at_a_time() -> None:
    trace = perfetto(example(ScheduleKind.INTERLEAVED, 3, 2, 6))["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace
        if event["name"] == "thread_name"
    }
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert names.keys() == threads.keys()
    assert {name for (rank, _), name in names.items() if rank == 0} == {
        "computes",
        "sums gradients",
        "sends to rank 1",
        "sends to rank 2",
    }
    for spans in threads.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in zip(spans, spans[1:], strict=False))


def test_what_stands_at_the_path_stays_until_the_whole_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device, wanted a file that can be written"):
        write_trace(example(ScheduleKind.GPIPE, 2, 1, 2), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trace file .*absent/step.json: found .*No such file"):
        write_trace(example(ScheduleKind.GPIPE, 2, 1, 2), tmp_path / "absent" / "step.json")
