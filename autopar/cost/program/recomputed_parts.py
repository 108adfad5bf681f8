"""Parts of a program that run again in backward, as runs of the tape's calls.

part        |  a = f(x)   b = g(a)   c = h(b)  |     taken: x      given: a, b, c      leaving: c
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.cost.program.tape import Tape


@dataclass(frozen=True, slots=True)
class RecomputedPart:
    """Calls [first, stop) of the tape that are recomputed in backward.

    `taken` are the storages that they take from outside, `given` those that they make, `leaving` those of
    them that stay for later calls.
    """

    first: int
    stop: int
    taken: tuple[int, ...]
    given: frozenset[int]
    leaving: tuple[int, ...]

    @property
    def calls(self) -> range:
        return range(self.first, self.stop)


def find_parts(tape: Tape, segments: Iterable[tuple[int, int]]) -> list[RecomputedPart]:
    """The parts of the operators in `segments`; calls are in the order of their operators."""
    places = [call.place for call in tape.calls]
    last = {tape.root[value]: n for n, call in enumerate(tape.calls) for value in call.memory.takes}
    last |= dict.fromkeys((tape.root[value] for value in tape.outputs), len(tape.calls))
    ends = ((bisect_left(places, first), bisect_left(places, stop)) for first, stop in segments)
    return [_part(tape, first, stop, last) for first, stop in ends if first < stop]


def _part(tape: Tape, first: int, stop: int, last: Mapping[int, int]) -> RecomputedPart:
    """Calls [first, stop) as a part; `last` is the number of the last call that takes each storage."""
    calls = [call.memory for call in tape.calls[first:stop]]
    given = frozenset(item.value for call in calls for item in call.gives if item.alias is None)
    used = dict.fromkeys(tape.root[value] for call in calls for value in call.takes)
    return RecomputedPart(
        first,
        stop,
        taken=tuple(root for root in used if root not in given),
        given=given,
        leaving=tuple(root for root in given if last.get(root, -1) >= stop),
    )
