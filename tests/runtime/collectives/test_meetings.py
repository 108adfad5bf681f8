"""Meetings of ranks, on a channel of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from autopar.runtime.collectives.local_sockets import PeerError
from autopar.runtime.collectives.meetings import Meetings
from tests.pool import Pool


def together() -> tuple[bool, list[str]]:
    """What this rank learns where all are at the same meeting."""
    meetings = Meetings.open(dist.group.WORLD, timedelta(seconds=20))
    return meetings.are_alike(b"1234567"), meetings.everybody(f"rank {dist.get_rank()}")


def apart() -> str:
    """What this rank is told where the first compares digests, and others tell objects."""
    rank = dist.get_rank()
    meetings = Meetings.open(dist.group.WORLD, timedelta(seconds=20))
    if not rank:
        with suppress(PeerError):
            meetings.are_alike(b"\xff" * 7)
        return ""
    try:
        meetings.everybody("here")
    except PeerError as error:
        return str(error)
    return "nothing"


def test_ranks_at_one_meeting_learn_of_each_other(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(together) == [(True, ["rank 0", "rank 1"])] * 2


def test_ranks_at_unlike_meetings_are_told_so(pools: Callable[[int], Pool]) -> None:
    assert "one that is at another call" in pools(2).run(apart)[1]
