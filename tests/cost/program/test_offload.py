"""What a step waits for copies to and from the host, by hand: 1 byte a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Link
from autopar.cost.program.offload import (
    Clock,
    Movable,
    backward_wait,
    copy_seconds,
    forward_wait,
    overlapped_until,
)
from autopar.runtime.saved.offload import AHEAD

SLOW = Link(0.0, 1.0)
TIMES = Clock(forward=(0, 1, 2, 3, 4, 20), backward=(24, 22, 20, 18, 16, 0))


def item(nbytes: int, *, made: int, needed: int) -> Movable:
    return Movable(
        ("x", ()), root=made, call=made, nbytes=nbytes, maker=made, made=made, needed=needed, read=needed
    )


def test_the_figures_below_are_for_two_ahead() -> None:
    assert AHEAD == 2


@pytest.mark.parametrize(
    ("nbytes", "late"),
    [
        ([16], 0),  # made at 4, gone at 20
        ([17], 1),
        ([3, 13], 0),  # from 3 to 6, from 6 to 19
        ([3, 14], 0),
        ([3, 15], 1),
        ([2, 2, 2], 0),  # 2 to 4, to 6, to 8; the third one is made at 4
        ([3, 2, 2], 1),  # ... when the first is still under way, until 5
        ([4, 1, 1, 1], 2),  # 1 to 5, 6, 7, 8; the third one, made at 3, waits until 5, the fourth until 6
    ],
)
def test_forward_waits_for_the_one_two_before_and_in_the_end_for_all(nbytes: list[int], late: float) -> None:
    count = len(nbytes)
    items = [item(size, made=5 - count + place, needed=1) for place, size in enumerate(nbytes)]
    assert forward_wait(items, TIMES, SLOW) == late


@pytest.mark.parametrize(
    ("nbytes", "late"),
    [
        ([16], 0),  # needed at 16
        ([17], 1),
        ([4, 14], 0),  # the last one first: 0 to 14, to 18
        ([5, 14], 1),
        ([5, 17], 4),  # 17 is late by 1; 0 to 17, to 22, needed at 18
        ([1, 2, 3], 0),  # the third is begun when the first is read, at 16: to 17
        ([4, 2, 3], 0),  # to 20, when it is needed
        ([5, 2, 3], 1),
    ],
)
def test_backward_begins_two_ahead_and_waits_for_what_it_reads(nbytes: list[int], late: float) -> None:
    count = len(nbytes)
    items = [item(size, made=1, needed=5 - count + place) for place, size in enumerate(nbytes)]
    assert backward_wait(items, TIMES, SLOW) == late


def test_every_copy_has_a_latency() -> None:
    assert copy_seconds(item(6, made=1, needed=1), Link(0.5, 2.0)) == 3.5


def test_a_stage_has_a_clock_of_its_own() -> None:
    assert TIMES.within(0, 5) == TIMES
    stage = TIMES.within(2, 4)
    assert stage.forward[2:] == (0, 1, 2)
    assert stage.backward[2:] == (4, 2, 0)


@pytest.mark.parametrize(
    ("nbytes", "until"),
    [
        (1, 2),  # gone at 2; backward of a stage with operators 1 and 2 begins 2 before it is needed
        (2, 2),  # gone at 3, when operator 2 has run
        (3, 3),  # gone at 4
        (5, 4),  # gone at 6, while operator 4 runs
        (20, 5),  # never: it would be gone at 21
    ],
)
def test_copies_hide_in_a_stage_that_goes_on_long_enough(nbytes: int, until: int) -> None:
    (found,) = overlapped_until([item(nbytes, made=1, needed=2)], TIMES, SLOW)
    assert found == until


def test_copies_leave_one_after_the_other() -> None:
    items = [replace(item(1, made=1, needed=needed), root=needed) for needed in (2, 1, 0)]
    assert overlapped_until(items, TIMES, SLOW) == [2, 2, 3]  # gone at 2, 3 and 4
