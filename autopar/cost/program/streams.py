"""Copies of weights that lie in the host's memory, and how long a micro-batch waits for them.

    forward    | waits for 0 |- op 0 -| waits |- op 1 -|      1 is copied from when 0 is there
                             |===== w1 =======|
    backward   |- op 2 -|- op 1 -| waits |- op 0 -|           w0 is copied from when w1 is read,
                        |= g2 =|== w0 ===|                    g2 from when it is made until op 1 is done

One copy goes after the other. What comes ahead costs what is computed meanwhile doesn't hide; the first in
forward and in backward, and the last gradient, hide behind nothing, nor does what isn't among `ahead`. Where
activations wait in the host's memory, too, the link is taken to be theirs: nothing of weights hides then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from autopar.core.placement import replicated
from autopar.cost.operators.host_weights import stream_seconds
from autopar.cost.operators.prices import Prices
from autopar.cost.program.ahead import ahead_groups, reads_after

if TYPE_CHECKING:
    from autopar.cost.program.offload import Clock
    from autopar.cost.program.priced_program import PricedProgram


@dataclass(frozen=True, slots=True)
class AheadCopy:
    """A copy of so many seconds that begins, and must be over, when so much has been computed."""

    seconds: float
    begins: float
    needed: float


def streamed(priced: PricedProgram) -> tuple[float, float]:
    """Seconds of a micro-batch's copies of weights to the device, and of their gradients back."""
    inputs = priced.program.inputs
    parts = [stream_seconds(priced.prices, name, inputs[name]) for name in priced.program.on_host]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def hidden_streams(priced: PricedProgram, times: Clock) -> tuple[float, float]:
    """Seconds of those that come ahead for which forward and backward don't wait."""
    return hidden(list(_forward(priced, times))), hidden(list(_backward(priced, times)))


def hidden(copies: Sequence[AheadCopy]) -> float:
    """Seconds of these copies, one after the other, that nobody waits for. What begins when another is needed
    comes after that."""
    moments = [(now, copy) for copy in copies for now in (copy.begins, copy.needed)]
    late = free = 0.0
    ends: dict[int, float] = {}
    for now, copy in sorted(moments, key=lambda moment: moment[0]):
        if id(copy) in ends:
            late = max(late, ends[id(copy)] - now)
        else:
            ends[id(copy)] = free = max(now + late, free) + copy.seconds
    return sum(copy.seconds for copy in copies) - late


def most_streamed(prices: Prices) -> float:
    """The most seconds that an assignment's copies of weights can take, in a micro-batch."""
    whole = replicated(len(prices.dims.mesh.shape))
    return sum(sum(stream_seconds(prices, name, whole)) for name in prices.on_host)


def _forward(priced: PricedProgram, times: Clock) -> Iterator[AheadCopy]:
    for (before, _), (place, calls) in pairwise(ahead_groups(priced.tape, priced.program).items()):
        seconds = sum(_seconds(priced, call) for call in calls)
        yield AheadCopy(seconds, times.forward[before], times.forward[place])


def _backward(priced: PricedProgram, times: Clock) -> Iterator[AheadCopy]:
    """Weights that are read again, and gradients."""
    if not priced.prices.training:
        return
    calls = priced.tape.calls
    fetched = {item.value: call for call in priced.tape.fetches for item in calls[call].memory.gives}
    for number, after in reads_after(priced.tape, priced.program).items():
        begins, needed = (times.backward[calls[call].place + 1] for call in (number, after.call))
        yield AheadCopy(_seconds(priced, fetched[after.comes]), begins, needed)
    groups = list(ahead_groups(priced.tape, priced.program).items())
    for (place, group), (before, _) in pairwise(reversed(groups)):
        seconds = sum(_seconds(priced, call) for call in group if calls[call].memory.gradients)
        yield AheadCopy(seconds, times.backward[place], times.backward[before])


def _seconds(priced: PricedProgram, call: int) -> float:
    return priced.prices.host_copy(sum(item.nbytes for item in priced.tape.calls[call].memory.gives))
