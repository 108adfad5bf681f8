"""A channel of its own on which all ranks say what they are about to do, before tensors travel.

    rank 0   digest --.
    rank 1   digest ---+-> all alike: nothing more
             unlike:      all say it in full

On a channel of its own, since what meets there must not be taken for a tensor, nor a tensor for it: a rank
that makes one call more would pair its next exchange with one of another call. Ranks of one machine have
sockets; others take one maximum of (h, -h), h being the digest, by gloo, beside NCCL too: no GPU waits.

On two cores that did other work, a meeting of two ranks took each of them 16 us of processor time by sockets
(31 us with waiting, the median), and 220 us at best by gloo.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.runtime.collectives.local_sockets import PeerError, SocketTransfer, Wires, connect

FIRST_MEETINGS = 100  # meetings, all of which are held
STEP_SECONDS = 0.02  # of a step to which what a meeting costs is compared
MOST_MEETING_SHARE = 0.005  # of such a step that meetings may take
RAREST = 64  # at least one of so many is held
_DIGEST, _LENGTH = b"\0", b"\1"  # what a message of 7 bytes more is
_NUMBER_BYTES = 7
_COST_UNIT = 1e-6  # seconds


@dataclass(slots=True)
class Meetings:
    """The meetings of all ranks of the world; `wires` carry them, where there are none `group` does.

    Every `stride`-th is held after the first ones: as often as the slowest rank's cost allows.
    """

    group: ProcessGroup
    wires: Wires | None
    stride: int = 1
    is_paused: bool = False  # while a pipeline isn't flushed at a step's border
    _cost: float = math.inf  # seconds of a rank, of the quickest so far

    @staticmethod
    def open(world: ProcessGroup, timeout: timedelta) -> Meetings:
        """Open a channel between all ranks; collective."""
        group = world
        wires = connect(world, timeout) if dist.get_backend(world) == dist.Backend.GLOO else None
        if wires is None:
            made: Any = dist.new_group(backend="gloo", timeout=timeout)
            group = made
            wires = connect(group, timeout) if dist.get_backend(world) != dist.Backend.GLOO else None
        return Meetings(group, wires)

    def is_held(self, number: int) -> bool:
        """Whether ranks meet before call `number`: always at first, then once in `stride` calls."""
        return not self.is_paused and (number <= FIRST_MEETINGS or number % self.stride == 0)

    def are_alike(self, digest: bytes) -> bool:
        """Whether all ranks have the same digest, of 7 bytes; collective."""
        if self.wires is not None:
            return len(set(self._gather(_DIGEST + digest))) == 1
        begin = time.perf_counter()
        number, cost = int.from_bytes(digest), 0 if math.isinf(self._cost) else self._cost
        extremes = torch.tensor([number, -number, math.ceil(cost / _COST_UNIT)])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        largest, negative, slowest = extremes.tolist()
        self._cost = min(self._cost, time.perf_counter() - begin)
        wanted = math.ceil(slowest * _COST_UNIT / (MOST_MEETING_SHARE * STEP_SECONDS))
        self.stride = min(RAREST, max(1, wanted))
        return bool(largest == -negative)

    def everybody(self, mine: object) -> list[Any]:
        """The objects of all ranks, rank 0 first; a collective."""
        if self.wires is None:
            told: list[Any] = [None] * self.group.size()
            dist.all_gather_object(told, mine, group=self.group)
            return told
        text = pickle.dumps(mine)
        lengths = [_length(each) for each in self._gather(_LENGTH + len(text).to_bytes(_NUMBER_BYTES))]
        return [pickle.loads(each) for each in self._gather(text, lengths)]

    def _gather(self, mine: bytes, lengths: list[int] | None = None) -> list[bytes]:
        """The bytes of each rank, by sockets; as many as this rank's if nothing else is said."""
        assert self.wires is not None
        lengths = lengths or [len(mine)] * (len(self.wires.sockets) + 1)
        slots = {peer: bytearray(lengths[peer]) for peer in self.wires.sockets}
        if len(slots) == 1:
            ((peer, slot),) = slots.items()
            self.wires.swap(peer, memoryview(mine), memoryview(slot))
        else:
            self._exchange(self.wires, mine, slots)
        return [bytes(slots[place]) if place in slots else mine for place in range(len(lengths))]

    def _exchange(self, wires: Wires, mine: bytes, slots: Mapping[int, bytearray]) -> None:
        exchange = SocketTransfer(
            wires,
            {peer: deque([memoryview(mine)]) for peer in slots},
            {peer: deque([memoryview(slot)]) for peer, slot in slots.items()},
        )
        for peer in slots:
            exchange.send(peer)
        exchange.wait()


def _length(message: bytes) -> int:
    """The length that a rank tells; raises PeerError for what it says elsewhere."""
    if message[:1] != _LENGTH:
        raise PeerError(
            where="ranks",
            found="one that is at another call",
            wanted="the same calls in the same order on all ranks",
            remedy="let an error that a rank catches in a call end its process, so that the others are told",
        )
    return int.from_bytes(message[1:])
