"""Weights that come from the host's memory ahead of their use, while a step is replayed.

    forward    op 0 and ==w1 comes==   op 1 and ==w2 comes==      there from the wait for the group before
    backward   op 1 and ==w0 comes==   op 0                       what is read next, from the read before
                                       and ==g1 goes==            gradients, until the group before is done

Groups are those of rewrite/fetch_ahead.py: what one operator is the first to take.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.core.program import Program
from autopar.cost.program.heap import Heap
from autopar.cost.program.tape import Tape


@dataclass(frozen=True, slots=True)
class Read:
    """A call whose backward reads a weight: the root that it saved, and that which comes for it."""

    call: int
    root: int
    comes: int


def ahead_groups(tape: Tape, program: Program) -> dict[int, list[int]]:
    """The calls that fetch weights ahead, by the operator that is the first to take them."""
    recomputed, groups = _recomputed(program), dict[int, list[int]]()
    for call, name in tape.fetches.items():
        place = tape.calls[call].place
        if name in program.ahead and place not in recomputed:
            groups.setdefault(place, []).append(call)
    return groups


def reads_after(tape: Tape, program: Program) -> Mapping[int, Read]:
    """By call, what backward reads next after it, of weights that come ahead."""
    calls = itertools.chain.from_iterable(ahead_groups(tape, program).values())
    recomputed = _recomputed(program)
    ahead = {item.value for call in calls for item in tape.calls[call].memory.gives}
    reads = [
        Read(number, root, tape.fetched.get(root, root))
        for number, call in reversed(list(enumerate(tape.calls)))
        if call.place not in recomputed
        for root in sorted(call.memory.saves & tape.gathered, reverse=True)
    ]
    return {
        one.call: after
        for one, after in pairwise(reads)
        if one.call != after.call and after.comes in ahead and after.root not in tape.together
    }


def _recomputed(program: Program) -> set[int]:
    return {place for first, stop in program.recompute for place in range(first, stop)}


class FetchesAhead:
    """The fetches of a program that begin early, and what of them is on the device before it is needed."""

    def __init__(self, heap: Heap, tape: Tape, program: Program) -> None:
        self.heap, self.tape = heap, tape
        groups = ahead_groups(tape, program)
        self.group_of = {call: place for place, calls in groups.items() for call in calls}
        self.begins: dict[int, tuple[int, ...]] = dict.fromkeys(self.group_of, ())  # calls, by the one before
        # Groups whose gradients are gone before a call's backward, and after it.
        self.before: dict[int, tuple[int, ...]] = {}
        self.after: dict[int, tuple[int, ...]] = {}
        for place, calls in itertools.islice(groups.items(), 1):
            self.begins[calls[0]], self.after[calls[0]] = tuple(calls), (place,)
        for (_, calls), (place, late) in pairwise(groups.items()):
            self.begins[calls[-1]] = (*self.begins[calls[-1]], *late)
            self.before[calls[-1]] = (place,)
        self.reads = reads_after(tape, program)
        self.coming: Read | None = None
        self.leaving: dict[int, list[Hashable]] = {}

    def __contains__(self, call: int) -> bool:
        return call in self.group_of

    def begin(self, call: int) -> None:
        """When a call's backward has what it reads, what is read next begins to come."""
        if (after := self.reads.get(call)) is not None:
            self.coming = after
            self.heap.hold(("coming", after.comes), self.tape.nbytes[after.comes])

    def come(self, call: int, *, is_made: bool) -> None:
        """Let go of the copy that came for a call: a weight is counted as that from now on, a shard is there
        until the full tensor `is_made` of it."""
        after = self.coming
        if after is not None and after.call == call and (is_made or after.comes == after.root):
            self.heap.drop(("coming", after.comes))
            self.coming = None

    def leave(self, call: int, key: Hashable) -> None:
        """Hold the gradient of what a call fetched until it has left."""
        self.leaving.setdefault(self.group_of[call], []).append(key)

    def wait(self, groups: Sequence[int]) -> None:
        """Wait until the gradients of groups have left."""
        for group in groups:
            for key in self.leaving.pop(group, ()):
                self.heap.drop(key)
