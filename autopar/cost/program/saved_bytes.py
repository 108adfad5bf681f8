"""What backward reads while a step is replayed: storages by who saves them, and each call's own bytes.

saved for   by keepers          from forward to the keeper's backward
for_weights         under a split backward up to its second half, which makes weights' gradients
held        gradients that the second half needs from the first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from autopar.cost.program.heap import Heap
from autopar.cost.program.tape import Tape


class SavedBytes:
    """Bytes saved for backward, in all (`now`) and by operator; only for stages (`staged`) by halves too."""

    def __init__(self, heap: Heap, tape: Tape, operators: int, *, staged: bool) -> None:
        self.heap, self.tape = heap, tape
        self.now = 0
        self.count: Counter[int] = Counter()  # of each storage, who saves it
        self.keepers: dict[int, list[int]] = {}  # of each storage, by place
        self.for_weights: dict[int, list[int]] = {}  # those of them whose backward makes gradients of weights
        self.own = [0] * (operators + 1)
        self.own_for_weights = [0] * (operators + 1)
        self.held = [0] * (operators + 1)
        self.held_back: set[Hashable] = set()
        self.by_operator = [0] * (operators + 1)
        self.of_weights, self.with_weights = _weighted(tape) if staged else (set(), set())

    def hold(self, root: int, place: int, *, for_weight: bool = False) -> None:
        """Save a storage for the operator at `place`."""
        nbytes = self.tape.nbytes[root]
        self.heap.hold(root, nbytes)
        self.keepers.setdefault(root, []).append(place)
        if for_weight:
            self.for_weights.setdefault(root, []).append(place)
        if not self.count[root]:
            self.now += nbytes
            self.by_operator[min(place, len(self.by_operator) - 1)] += nbytes
        self.count[root] += 1

    def release(self, root: int) -> None:
        """Let one of its keepers go."""
        self.heap.drop(root)
        self.count[root] -= 1
        if not self.count[root]:
            self.now -= self.tape.nbytes[root]

    def hold_own(self, number: int) -> None:
        """Save what a call alone knows, such as random masks."""
        call = self.tape.calls[number]
        self.heap.hold(("own", number), call.memory.own)
        self.own[call.place] += call.memory.own
        self.own_for_weights[call.place] += call.memory.own if self.has_weight(number) else 0
        self.by_operator[call.place] += call.memory.own
        self.now += call.memory.own

    def release_own(self, number: int) -> None:
        self.heap.drop(("own", number))
        self.now -= self.tape.calls[number].memory.own

    def has_weight(self, number: int) -> bool:
        """Whether a call's backward makes gradients of weights, or operands of those."""
        return number in self.with_weights or number in self.of_weights

    def hold_back(self, number: int, gradients: Iterable[Hashable]) -> None:
        """Hold the gradients of what a weight made until a split backward computes the weight's."""
        if number in self.with_weights:
            for key in dict.fromkeys(gradients):
                if key not in self.held_back:
                    self.held_back.add(key)
                    self.held[self.tape.calls[number].place] += self.heap.sizes[key]

    def hold_recomputed(self, number: int) -> None:
        """Hold what a call of a recomputed part saves between the halves of a split backward, too."""
        if not self.has_weight(number):
            return
        memory, place = self.tape.calls[number].memory, self.tape.calls[number].place
        for root in memory.saves - self.tape.gathered:
            self.for_weights.setdefault(root, []).append(place)
        if memory.repeats:
            self.own_for_weights[place] += memory.own


def _weighted(tape: Tape) -> tuple[set[int], set[int]]:
    """The calls that make something of a weight alone, and those that do of one and of other values."""
    alone: set[int] = set()
    found: set[int] = set()
    weights = {weight.value for weight in tape.weights}
    for number, call in enumerate(tape.calls):
        if weights.isdisjoint(item.value for item in call.memory.gradients):
            continue
        if weights.issuperset(call.memory.takes):  # a conversion of weights, or a view
            weights.update(item.value for item in call.memory.gives)
            alone.add(number)
        else:
            found.add(number)
    return alone, found
