"""Streams between ranks: large tensors cross, strangers and lost ranks are noticed, and all ranks agree."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.core.mesh import Mesh
from autopar.runtime.collectives import groups, local_sockets, transport
from autopar.runtime.collectives.local_sockets import PeerError, Wires
from tests.pool import Pool

LIMIT = timedelta(seconds=60)


def _pair(timeout: float = 60.0) -> tuple[Wires, Wires]:
    """Of two ranks in one process."""
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    mine.setblocking(False)
    theirs.setblocking(False)
    return Wires(0, {1: mine}, timeout), Wires(1, {0: theirs}, timeout)


def test_tensors_arrive_in_their_order_and_of_every_kind() -> None:
    sent = [torch.randn(3, 4), torch.tensor(True), torch.arange(5, dtype=torch.int16).bfloat16()]
    slots = [torch.empty_like(tensor) for tensor in sent]
    first, second = _pair()
    leaving = first.start([(1, tensor) for tensor in sent], [])
    second.start([], [(0, slot) for slot in slots]).wait()
    leaving.wait()
    assert all(map(torch.equal, sent, slots))


def test_what_is_sent_is_there_before_anyone_waits() -> None:
    first, second = _pair()
    first.start([(1, torch.ones(100))], [])  # and this rank goes on to compute
    slot = torch.zeros(100)
    second.start([], [(0, slot)]).wait()
    assert slot.sum() == 100


def test_a_lost_rank_is_named() -> None:
    first, second = _pair()
    second.sockets[0].close()
    with pytest.raises(
        PeerError, match="rank 0 of a group, waiting for rank 1 of a group: found .*stream ended"
    ):
        first.start([], [(1, torch.zeros(1))]).wait()
    with pytest.raises(PeerError, match="Broken pipe"):
        first.start([(1, torch.zeros(1))], []).wait()


def test_a_rank_that_is_lost_while_it_is_sent_to_is_named() -> None:
    first, second = _pair()
    under_way = first.start([(1, torch.zeros(8 << 20))], [])
    second.sockets[0].close()
    with pytest.raises(PeerError, match="rank 1 of a group"):
        under_way.wait()


def test_a_silent_rank_is_not_waited_for_longer_than_the_timeout() -> None:
    first, second = _pair(timeout=0.05)
    with pytest.raises(PeerError, match=r"nothing from it for 0\.05 s"):
        first.start([], [(1, torch.zeros(1))]).wait()
    assert second.sockets  # which was there all the time


def _crossing(ranks: int, size: int) -> bool:
    """All ranks send to all others at once, more than the kernel holds."""
    key = _set_up(ranks)
    mine, peers = dist.get_rank(), [peer for peer in range(ranks) if peer != dist.get_rank()]
    slots = {peer: torch.empty(size) for peer in peers}
    full = torch.full((size,), float(mine))
    transport.transfer([(peer, full) for peer in peers], slots.items(), key)
    assert groups.wires(groups.group(key)) is not None
    return all(bool((slot == peer).all()) for peer, slot in slots.items())


def _set_up(ranks: int) -> str:
    mesh = Mesh((ranks,))
    key = mesh.key((0,))
    groups.setup(mesh, [key], timeout=LIMIT)
    return key


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_send_to_each_other_do_not_block(ranks: int, pools: Callable[[int], Pool]) -> None:
    assert all(pools(ranks).run(_crossing, ranks, 4 << 20))


@contextmanager
def _unreachable() -> Iterator[None]:
    """As if this rank were on another machine."""
    before = local_sockets._connects
    local_sockets._connects = lambda stream, name: None
    try:
        yield
    finally:
        local_sockets._connects = before


def _connected_but_for(lonely: int, ranks: int) -> bool:
    key = _set_up(ranks)
    if dist.get_rank() != lonely:
        return local_sockets.connect(groups.group(key), LIMIT) is None
    with _unreachable():
        return local_sockets.connect(groups.group(key), LIMIT) is None


def test_either_all_ranks_have_streams_or_none(pools: Callable[[int], Pool]) -> None:
    assert all(pools(3).run(_connected_but_for, 2, 3))


@contextmanager
def _visited(count: int) -> Iterator[list[str]]:
    """Within, so many strangers connect to this rank's listener before any rank does, and say nothing."""
    before, seen = local_sockets._listen, list[str]()
    guests = [socket.socket(socket.AF_UNIX) for _ in range(count)]

    def listen(undo: ExitStack) -> tuple[socket.socket | None, str]:
        listener, name = before(undo)
        seen.append(name)
        for guest in guests:
            guest.connect(name)
        return listener, name

    local_sockets._listen = listen
    try:
        yield seen
    finally:
        local_sockets._listen = before
        for guest in guests:
            guest.close()


def _connected_among_strangers() -> tuple[bool, int, bool]:
    """Whether this rank has streams, the permissions of the folder where it listened, and whether that is
    gone."""
    key = _set_up(3)
    modes: list[int] = []
    with _visited(local_sockets.FEW_RANKS + 1) as seen:
        before = local_sockets._all_agree

        def agree(mine: bool, group: dist.ProcessGroup) -> bool:
            modes.append(stat.S_IMODE(Path(seen[0]).parent.stat().st_mode))
            return before(mine, group)

        local_sockets._all_agree = agree
        try:
            wires = local_sockets.connect(groups.group(key), LIMIT)
        finally:
            local_sockets._all_agree = before
    return wires is not None and len(wires.sockets) == 2, modes[0], not Path(seen[0]).parent.exists()


def test_strangers_keep_nobody_from_starting(pools: Callable[[int], Pool]) -> None:
    assert pools(3).run(_connected_among_strangers) == [(True, 0o700, True)] * 3
