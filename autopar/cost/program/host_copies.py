"""Saved storages that wait in the host's memory while a step is replayed: when each leaves and is back.

forward     a ==out==      b ==out==                 leaves once it is made; that AHEAD before it has left
backward                        ==in== b  ==in== a   and is fetched AHEAD of who reads it
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from autopar.cost.program.heap import Heap
from autopar.cost.program.offload import Movable
from autopar.cost.program.tape import Tape
from autopar.runtime.saved.offload import AHEAD


class HostCopies:
    """The storages of `items`, in the order in which they are read backwards.

    Stages begin at `starts`: what one offloads has left when it has run, and is fetched when its backward
    begins.
    """

    def __init__(self, heap: Heap, tape: Tape, items: Sequence[Movable], starts: Sequence[int]) -> None:
        self.heap, self.tape, self.starts = heap, tape, starts
        read = [item.needed - 1 for item in items]
        self.firsts_of = [*(bisect_left(read, start) for start in starts), len(items)]  # in `order`, by stage
        self.order = [item.root for item in items]
        self.number = {root: number for number, root in enumerate(self.order)}
        self.marks: dict[int, list[int]] = {}  # what begins to leave after each call
        for item in sorted(items, key=lambda item: item.call):
            self.marks.setdefault(item.call, []).append(item.root)
        self.leaving: list[int] = []
        self.readers: Counter[int] = Counter()  # of each, calls whose backward is to come
        self.savers: dict[int, list[int]] = {}  # of each, the places of who would save it
        self.back: set[int] = set()  # those that were fetched
        self.begun: set[int] = set()  # stages that have begun to fetch

    def __contains__(self, root: int) -> bool:
        return root in self.number

    def save(self, root: int, place: int) -> None:
        """Note that the operator at `place` would save a storage, which waits on the host instead."""
        self.readers[root] += 1
        self.savers.setdefault(root, []).append(place)

    def begin(self, call: int) -> None:
        """Before a stage's first call, let go of all that the stage before offloads."""
        if call and self.stage_of(call) != self.stage_of(call - 1):
            self.wait()

    def leave(self, call: int) -> None:
        """Begin to copy to the host what is complete after a call; the one AHEAD before has left."""
        for root in self.marks.get(call, ()):
            self.heap.hold(root, self.tape.nbytes[root])
            self.leaving.append(root)
            if len(self.leaving) > AHEAD:
                self.heap.drop(self.leaving.pop(0))

    def wait(self) -> None:
        """Wait for every copy to the host that has begun."""
        while self.leaving:
            self.heap.drop(self.leaving.pop(0))

    def read(self, call: int) -> None:
        """Fetch what a call reads in backward, and begin to fetch what its stage reads after it."""
        memory, stage = self.tape.calls[call].memory, self.stage_of(call)
        first, stop = self.firsts_of[stage : stage + 2]
        if stage not in self.begun and (memory.own or memory.saves - self.tape.gathered):
            self.begun.add(stage)
            self.fetch(max(first, stop - AHEAD), stop)
        for root in sorted(memory.saves & self.number.keys(), key=lambda root: -self.number[root]):
            self.fetch(max(first, self.number[root] - AHEAD), self.number[root] + 1)

    def fetch(self, first: int, stop: int) -> None:
        for root in self.order[first:stop]:
            if self.readers[root] and root not in self.back:
                self.back.add(root)
                self.heap.hold(("back", root), self.tape.nbytes[root])

    def release(self, root: int) -> None:
        """Note that one of its readers is done."""
        self.readers[root] -= 1
        if not self.readers[root] and root in self.back:
            self.heap.drop(("back", root))

    def stage_of(self, call: int) -> int:
        return bisect_right(self.starts, self.tape.calls[call].place) - 1
