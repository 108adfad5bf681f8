"""What may wait for backward in the host's memory, and how long a step waits for it.

    forward    [ op 0 ][ op 1 ][ op 2 ][   op 3   ][ op 4 ] waits        a is made by 0, b by 1, c by 4
    out            a ------  b ------                      c ------      |
    backward   [ op 4 ][  op 3  ][ op 2 ] waits [ op 1 ][ op 0 ]         c is kept by 4, b by 2, a by 1
    back      c  b ----- a --------------------
             ^ begun ahead of time, as runtime/saved/offload.py does

Out and back, storages travel one after the other, in the order in which they are made and needed. When one is
made, the AHEAD before it may still be under way; forward ends when all have left. Backward begins by fetching
the last AHEAD, and when it reads one, the AHEAD before that. What is waited for copies is paid.

Each pipeline stage does so for itself, with what it makes and reads itself: its forward ends before that of
the whole, and its backward begins to fetch later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from autopar.core.costs import LinkLike
from autopar.core.offload import OffloadedTensor
from autopar.cost.program.streams import hidden_streams, streamed
from autopar.runtime.saved.offload import AHEAD

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram


@dataclass(frozen=True, slots=True)
class Movable:
    """Memory of `nbytes` that backward reads, and no part that is recomputed takes or makes: `root` on
    the tape, known as `tensor` after `call`, for the operator `maker`. It is `made` when so many operators
    have run, and `needed` when backward has so many still before it, by the call `read`."""

    tensor: OffloadedTensor
    root: int
    call: int
    nbytes: int
    maker: int
    made: int
    needed: int
    read: int


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of `forward` when so many operators have run, and of `backward` when so many are before it."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def within(self, start: int, stop: int) -> Clock:
        """The clock of a stage with the operators [start, stop) alone, for moments in it."""
        return Clock(
            tuple(seconds - self.forward[start] for seconds in self.forward[: stop + 1]),
            tuple(seconds - self.backward[stop] for seconds in self.backward[: stop + 1]),
        )


def movable(priced: PricedProgram) -> list[Movable]:
    """All that may be offloaded, in the order of Program.offload, which makes no difference itself."""
    tape = priced.tape
    recomputed = {place for first, stop in priced.program.recompute for place in range(first, stop)}
    read: dict[int, int] = {}
    barred = set(tape.gathered)
    for number, call in enumerate(tape.calls):
        read |= dict.fromkeys(call.memory.saves, number)
        if call.place in recomputed:
            values = (*call.memory.takes, *(item.value for item in call.memory.gives))
            barred.update(tape.root[value] for value in values)
    found = [
        Movable(
            tensor=(made.name, made.layout),
            root=root,
            call=made.call,
            nbytes=tape.nbytes[root],
            maker=tape.calls[made.call].place,
            made=made.operators,
            needed=tape.calls[read[root]].place + 1,
            read=read[root],
        )
        for root, made in tape.made.items()
        if root in read and root not in barred and tape.nbytes[root]
    ]
    return sorted(found, key=lambda item: (item.read, item.call))


def offloaded(priced: PricedProgram) -> list[Movable]:
    """Tensors that the program offloads, in its order, without those inside recomputed parts."""
    if not priced.program.offload:
        return []
    known = {item.tensor: item for item in movable(priced)}
    return [known[each] for each in priced.program.offload if each in known]


def clock(priced: PricedProgram) -> Clock:
    """Seconds at which operators run if nothing stands between them: no copy need hide behind exchanges."""
    costs = priced.operator_prices
    backward = accumulate((cost.backward for cost in reversed(costs)), initial=0.0)
    return Clock(tuple(accumulate((cost.forward for cost in costs), initial=0.0)), tuple(backward)[::-1])


def wait_seconds(priced: PricedProgram) -> tuple[float, float]:
    """Seconds by which forward and backward of a micro-batch wait for copies from and to the host."""
    items = offloaded(priced)
    link = priced.prices.cluster.host
    forward, backward = streamed(priced)
    if link is None or not (items or priced.program.ahead):
        return forward, backward
    times = clock(priced)
    if not items:
        there, back = hidden_streams(priced, times)
        return forward - there, backward - back
    return forward + forward_wait(items, times, link), backward + backward_wait(items, times, link)


def forward_wait(items: Sequence[Movable], times: Clock, link: LinkLike) -> float:
    """Seconds by which forward is late in the end."""
    late, ends = 0.0, [0.0]
    for item in sorted(items, key=lambda item: item.call):
        now = times.forward[item.made]
        ends.append(max(now + late, ends[-1]) + copy_seconds(item, link))
        if len(ends) > AHEAD + 1:
            late = max(late, ends[-1 - AHEAD] - now)
    return max(late, ends[-1] - times.forward[-1])


def backward_wait(items: Sequence[Movable], times: Clock, link: LinkLike) -> float:
    """Seconds by which copies delay the end of backward; `items` come in the order of their numbers."""
    late = end = 0.0
    begun = [0.0] * AHEAD  # of each copy, at the earliest
    for place, item in enumerate(reversed(items)):
        end = max(begun[place], end) + copy_seconds(item, link)
        late = max(late, end - times.backward[item.needed])
        begun.append(times.backward[item.needed] + late)
    return late


def overlapped_until(items: Sequence[Movable], times: Clock, link: LinkLike) -> list[int]:
    """For each of `items` about the operator up to which a stage must reach to overlap its copies.

    Neither forward nor backward waits for any of them; none that there is if they never do. In forward it
    must have left; in backward it may be the first that is fetched.
    """
    until, ends = dict[int, int](), 0.0
    for item in sorted(items, key=lambda item: item.call):
        ends = max(ends, times.forward[item.made]) + copy_seconds(item, link)
        latest = times.backward[item.needed] - copy_seconds(item, link)
        left = bisect_left(times.forward, ends)
        fetched = bisect_left(times.backward, -latest, key=lambda seconds: -seconds)
        until[item.root] = max(item.needed, left, fetched) - 1
    return [until[item.root] for item in items]


def copy_seconds(item: Movable, link: LinkLike) -> float:
    """Seconds to copy an offloaded tensor to the host, or back."""
    return link.seconds(item.nbytes)
