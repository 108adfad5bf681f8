"""Peak memory of a plan, by replaying one step: what is alive at every moment, in bytes.

    state       weights, the optimizer's state, copies that are gathered once, a rank's blocks: all step long
    saved       storages and scratch that backward reads: from forward to there; of a weight that is gathered
                again, and of what is offloaded, nothing
    working     what calls take and give, and gradients, while somebody still needs them

    forward     | x ====================== |            a part that is recomputed keeps what it takes
                |    a ===   b ===   c === |            and what ranks exchanged, and in backward all else
    backward    |       a' = b' = c' = | then gradients  from its first moment

A compiled program holds nothing for what stays inside a fused group, and gives all gradients of weights when
its backward ends.

Tensors are counted as torch holds them: a call's operands until their last use, results from its start,
gradients from when they are made until the call that made their tensor has taken them. A view shares
its storage, a gradient that is passed on too. What kernels need inside isn't counted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.core.deadline import check_time
from autopar.core.graph import InputKind
from autopar.cost.program.ahead import FetchesAhead
from autopar.cost.program.heap import GradientSums, Heap
from autopar.cost.program.host_copies import HostCopies
from autopar.cost.program.offload import clock, offloaded, overlapped_until
from autopar.cost.program.recomputed_parts import RecomputedPart, find_parts
from autopar.cost.program.saved_bytes import SavedBytes
from autopar.cost.program.storages import Footing, SavedStorage
from autopar.cost.program.tape import Tape, TapeCall, Weight

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes per device: `nbytes` at the peak of a step, `state` of weights, their gradients and what the
    optimizer keeps, `saved` for backward when it begins."""

    nbytes: int
    state: int
    saved: int
    by_operator: dict[str, int]  # bytes that each operator saves for backward


def peak_memory(priced: PricedProgram) -> Peak:
    """Replay one step of the largest rank, with the parts of the program that are recomputed."""
    check_time()
    return Replay(priced).run()


def footing(priced: PricedProgram, *, starts: Sequence[int] | None = None) -> Footing:
    """Memory of each operator on the largest rank, for pipeline cuts to add up. A stage moves what hides in
    it of what the program moves, or all if that is of the stages from `starts` on."""
    replay = Replay(priced, staged=True, starts=starts or (0,))
    replay.run()
    link = priced.prices.cluster.host
    if starts is None and link is not None:
        until = overlapped_until(replay.offloads, clock(priced), link)
    else:
        until = [item.needed - 1 for item in replay.offloads]
    return replay.footing({item.root: place for item, place in zip(replay.offloads, until, strict=True)})


class Replay:
    """One step. Keys of storages are roots; ("recomputed", root) of those that are recomputed, ("back", root)
    of those that were fetched from the host, ("own", call) of scratch, ("gradient", number) of gradients.

    For stages `staged` leaves out what is there all step, sums of gradients among it. What is offloaded has
    left when the stage that begins at one of `starts` has run, and is fetched when its backward begins.
    """

    def __init__(self, priced: PricedProgram, *, staged: bool = False, starts: Sequence[int] = (0,)) -> None:
        self.graph, self.prices, self.program = priced.graph, priced.prices, priced.program
        self.staged = staged
        self.tape: Tape = priced.tape
        self.unread = priced.unread
        self.calls = self.tape.calls
        self.firsts: dict[int, int] = {}  # the first call that takes each value
        for number, call in enumerate(self.calls):
            for value in call.memory.takes:
                self.firsts.setdefault(value, number)
        trains, operators = self.prices.training, len(self.graph.operators)
        self.parts = find_parts(self.tape, self.program.recompute) if trains else []
        self.offloads = offloaded(priced) if trains else []
        self.heap = self.new_heap()
        self.copies: set[int] = set()  # roots that are there as copies
        self.variables: set[Hashable] = set()  # storages that a later call takes
        self.saved = SavedBytes(self.heap, self.tape, operators, staged=staged)
        self.host = HostCopies(self.heap, self.tape, self.offloads, starts)
        self.ahead = FetchesAhead(self.heap, self.tape, self.program)
        self.working = [0] * (operators + 1)
        self.forward_working = self.working
        self.slots: dict[int, Hashable] = {}  # the gradient of each value
        self.made = 0  # gradients
        weights = sorted(self.tape.weights, key=self.first_use)
        self.sums = GradientSums(
            self.heap, weights, adding=self.prices.accumulates, device=self.prices.device.kind
        )

    def new_heap(self) -> Heap:
        """The memory in which it is replayed."""
        return Heap()

    def run(self) -> Peak:
        state = [
            item
            for item in self.graph.inputs
            if item.kind is not InputKind.USER and item.name not in self.unread
        ]
        state_bytes = self.tape.copies + sum(
            self.prices.state_bytes(item.name, self.program.inputs[item.name]) for item in state
        )
        state_bytes += self.part_bytes()
        if not self.staged:
            lasts = self.prices.step_weight < 1.0  # of full gradients, those that add up
            gradients = sum(weight.nbytes + lasts * weight.full for weight in self.tape.weights)
            self.heap.hold("state", state_bytes - gradients)
            self.heap.hold("batch", self.batch_bytes())
            self.sums.begin()
        self.forward()
        kept, self.forward_working = self.saved.now, list(self.working)
        if self.prices.training:
            self.backward()
            if not self.staged:
                self.sums.finish()
        names = [item.name for item in self.graph.operators]
        by_operator = dict(zip(names, self.saved.by_operator, strict=False))
        return Peak(self.heap.most, state_bytes, kept, by_operator)

    def part_bytes(self) -> int:
        """Bytes of the rank's parts of a structure, held beside the graph's inputs."""
        parts: dict[object, int] = {}
        for item in self.graph.operators:
            parts |= self.prices.parts(item, self.program.strategies[item.name])
        return sum(parts.values())

    def batch_bytes(self) -> int:
        """The user's batch, of which every rank holds the whole, and its structure."""
        users = (item.spec.nbytes for item in self.graph.inputs if item.kind is InputKind.USER)
        return self.prices.micro_batches * sum(users) + self.graph.beside

    def footing(self, until: Mapping[int, int]) -> Footing:
        calls_of: dict[int, int] = {}
        for call in self.calls:
            for value in (*call.memory.takes, *(item.value for item in call.memory.gives)):
                calls_of.setdefault(self.tape.root[value], call.place)
        last = len(self.graph.operators)
        return Footing(
            saved=tuple(
                SavedStorage(
                    self.tape.names[root],
                    self.tape.nbytes[root],
                    calls_of[root],
                    keepers=tuple(sorted(self.saved.keepers.get(root, ()))),
                    for_weights=tuple(sorted(self.saved.for_weights.get(root, ()))),
                )
                for root in dict.fromkeys((*self.saved.keepers, *self.saved.for_weights))
                if self.tape.nbytes[root]
            )
            + tuple(
                SavedStorage(
                    self.tape.names[root],
                    self.tape.nbytes[root],
                    calls_of[root],
                    keepers=tuple(sorted(places)),
                    for_weights=(),
                    until=until[root],
                )
                for root, places in self.host.savers.items()
            ),
            own=tuple(self.saved.own[:last]),
            own_for_weights=tuple(self.saved.own_for_weights[:last]),
            held=tuple(self.saved.held[:last]),
            working=self.by_place(self.working),
            forward=self.by_place(self.forward_working),
        )

    def by_place(self, amounts: Sequence[int]) -> tuple[int, ...]:
        """The amounts of operators, of which the last has the conversions of outputs."""
        last = len(self.graph.operators)
        return (*amounts[: last - 1], max(amounts[last - 1 :])) if last else ()

    def key(self, root: int) -> Hashable:
        return ("recomputed", root) if root in self.copies else root

    def note(self, place: int, scratch: int = 0) -> None:
        """The working bytes of this moment, with `scratch` that is gone in the next."""
        self.heap.most = max(self.heap.most, self.heap.now + scratch)
        self.working[place] = max(self.working[place], self.heap.now + scratch - self.saved.now)

    # -- forward ----------------------------------------------------------------------------------

    def forward(self) -> None:
        for value in self.tape.users:  # the call's arguments live until it returns
            self.heap.hold(self.tape.root[value], self.tape.nbytes[value])
        left = self.uses(self.calls)
        for value in self.tape.outputs:
            left[self.tape.root[value]] += 1
        number = 0
        for part in (*self.parts, None):
            stop = len(self.calls) if part is None else part.first
            while number < stop:
                self.host.begin(number)
                self.call(number)
                if self.prices.training:
                    self.save(number)
                self.finish(number, left)
                self.host.leave(number)
                number += 1
            if part is not None:
                self.first_time(part, left)
                number = part.stop
        self.host.wait()
        for value in self.tape.users:
            self.heap.drop(self.tape.root[value])
        if self.prices.accumulates or self.staged:  # of a step the loss alone is left
            for value in self.tape.outputs:
                self.use(self.tape.root[value], left)

    def save(self, number: int) -> None:
        """Save for backward what a call saves, but for what waits in the host's memory."""
        place = self.calls[number].place
        for root in self.calls[number].memory.saves - self.tape.gathered:
            if root in self.host:
                self.host.save(root, place)
            else:
                self.saved.hold(root, place, for_weight=self.saved.has_weight(number))
        self.saved.hold_own(number)

    def first_time(self, part: RecomputedPart, left: Counter[int]) -> None:
        """Run a part in forward, saving what it takes and what it will not make again."""
        for root in part.taken:
            self.saved.hold(root, self.calls[part.first].place)
        for number in part.calls:
            call = self.calls[number]
            self.call(number)
            if not call.memory.repeats:
                for item in call.memory.gives:
                    self.saved.hold(item.value, call.place)
                self.saved.hold_own(number)
            self.finish(number, left)

    def uses(self, calls: Iterable[TapeCall]) -> Counter[int]:
        return Counter(self.tape.root[value] for call in calls for value in call.memory.takes)

    def call(self, number: int) -> None:
        """Begin a call; what it fetches has begun ahead, if it may."""
        begun = self.ahead.begins.get(number, (number,))
        for item in itertools.chain.from_iterable(self.calls[each].memory.gives for each in begun):
            if item.alias is None:
                key = self.key(item.value)
                self.heap.hold(key, item.nbytes)
                self.variables.add(key)

    def finish(self, number: int, left: Counter[int]) -> None:
        """Free storages without later uses; `left` counts the uses to come of each."""
        call = self.calls[number]
        self.note(call.place, call.memory.forward_scratch)
        for value in call.memory.takes:
            self.use(self.tape.root[value], left)
        for item in call.memory.gives:
            if not left[self.tape.root[item.value]]:
                self.forget(self.tape.root[item.value])

    def use(self, root: int, left: Counter[int]) -> None:
        left[root] -= 1
        if not left[root]:
            self.forget(root)

    def forget(self, root: int) -> None:
        key = self.key(root)
        if key in self.variables:
            self.variables.remove(key)
            self.heap.drop(key)

    # -- backward ---------------------------------------------------------------------------------

    def backward(self) -> None:
        again = {number for part in self.parts for number in part.calls}
        self.regathers = Counter(
            root
            for number, call in enumerate(self.calls)
            if number not in again
            for root in call.memory.saves & self.tape.gathered
        )
        firsts: dict[int, list[Weight]] = {self.first_use(weight): [] for weight in self.tape.weights}
        for weight in self.tape.weights:
            firsts[self.first_use(weight)].append(weight)
        begun = [self.gradient(self.tape.nbytes[self.tape.root[value]]) for value in self.tape.losses]
        for value, key in zip(self.tape.losses, begun, strict=True):
            self.heap.hold(key, 0)  # who calls backward holds what it begins with until it returns
            self.slots[value] = key
        parts = {part.stop - 1: part for part in self.parts}
        part = None
        arrived: list[tuple[Weight, Hashable]] = []
        for number in reversed(range(len(self.calls))):
            if number in parts:
                part = parts[number]
                self.second_time(part)
            self.differentiate(number, part)
            for weight in firsts.get(number, ()):
                if weight.value in self.slots:
                    arrived.append((weight, self.slots.pop(weight.value)))
            if self.prices.groups is None:
                self.deliver(arrived)
            if part is not None and number == part.first:
                for root in part.taken:
                    self.saved.release(root)
                self.copies, part = set(), None
        self.deliver(arrived)
        for key in begun:
            self.heap.drop(key)

    def deliver(self, arrived: list[tuple[Weight, Hashable]]) -> None:
        """Hand on the gradients of weights: as they come, or when a compiled backward gives all of them."""
        for weight, key in arrived:
            self.arrive(weight, key)
        arrived.clear()

    def first_use(self, weight: Weight) -> int:
        """The first call that takes the weight; -1 if none does."""
        return self.firsts.get(weight.value, -1)

    def second_time(self, part: RecomputedPart) -> None:
        """Recompute a part, up to the last tensor that its backward reads."""
        calls = [self.calls[number] for number in part.calls]
        kept = {item.value for call in calls if not call.memory.repeats for item in call.memory.gives}
        self.copies = set(part.given - kept)
        left = self.uses(calls)
        for root in part.leaving:
            left[root] += 1  # stays until the part has run
        until = max(
            (
                number
                for number in part.calls
                if self.calls[number].memory.saves or self.calls[number].memory.own
            ),
            default=part.first - 1,
        )
        for number in range(part.first, until + 1):
            memory = self.calls[number].memory
            if memory.repeats:
                self.call(number)
                self.heap.hold(("own", number), memory.own)
            for root in memory.saves:
                self.heap.hold(self.key(root), self.tape.nbytes[root])
            self.saved.hold_recomputed(number)
            self.finish(number, left)
        for root in part.given:
            self.forget(root)
        for root in kept:
            self.saved.release(root)

    def differentiate(self, number: int, part: RecomputedPart | None) -> None:
        """Run a call's backward: from the gradients of what it gave to those of what it took."""
        call = self.calls[number]
        self.ahead.wait(self.ahead.before.get(number, ()))
        incoming = {
            item.value: self.slots.pop(item.value) for item in call.memory.gives if item.value in self.slots
        }
        self.saved.hold_back(number, incoming.values())
        if part is None and incoming:
            self.host.read(number)
        gathered = call.memory.saves & self.tape.gathered if part is None and incoming else frozenset()
        self.ahead.come(number, is_made=False)
        for root in gathered:
            self.regather(root)
        self.ahead.come(number, is_made=True)
        if gathered:
            self.ahead.begin(number)
        is_over = part is None and any(item.value in self.tape.gathered for item in call.memory.gives)
        if is_over:  # who gathered it anew has: nobody reads the cast shard any more
            self.release(number)
        made = self.gradients(call, incoming) if incoming else []
        self.note(call.place, call.memory.backward_scratch if incoming else 0)
        for root in gathered:
            self.regathers[root] -= 1
            if root not in self.tape.together or not self.regathers[root]:
                self.heap.drop(("gathered", root))
        if part is not None:
            self.forget_recomputed(number)
        elif not is_over:
            self.release(number)
        for key in incoming.values():
            if number in self.ahead:
                self.ahead.leave(number, key)
            else:
                self.heap.drop(key)
        self.ahead.wait(self.ahead.after.get(number, ()))
        for value, key in made:
            self.add(value, key)
        self.note(call.place)

    def gradients(self, call: TapeCall, incoming: Mapping[int, Hashable]) -> list[tuple[int, Hashable]]:
        """Make the gradients of what a call took, or hold those of what it gave that they are."""
        made = []
        for item in call.memory.gradients:
            if item.alias is None:
                made.append((item.value, self.gradient(item.nbytes)))
            elif item.alias in incoming:
                self.heap.hold(incoming[item.alias], 0)
                made.append((item.value, incoming[item.alias]))
        return made

    def release(self, number: int) -> None:
        """Let go of what a call has saved."""
        for root in self.calls[number].memory.saves - self.tape.gathered:
            (self.host if root in self.host else self.saved).release(root)
        self.saved.release_own(number)

    def regather(self, root: int) -> None:
        """Have a weight there, with all that are to be of its group; those last until their last use."""
        for each in self.tape.together.get(root, (root,)):
            if each == root or self.regathers[each]:
                key = "gathered", each
                if not (each in self.tape.together and self.heap.holds[key]):
                    self.heap.hold(key, self.tape.nbytes[each])

    def forget_recomputed(self, number: int) -> None:
        """Free what a recomputed call has saved."""
        memory = self.calls[number].memory
        for root in memory.saves:
            self.heap.drop(self.key(root))
        if memory.repeats:
            self.heap.drop(("own", number))
        else:
            self.saved.release_own(number)

    def arrive(self, weight: Weight, key: Hashable) -> None:
        if self.staged:  # added to what is there all step
            self.heap.drop(key)
        else:
            self.sums.arrive(weight, key)

    def gradient(self, nbytes: int) -> Hashable:
        """Make a new gradient, held once."""
        self.made += 1
        self.heap.hold(("gradient", self.made), nbytes)
        return "gradient", self.made

    def add(self, value: int, key: Hashable) -> None:
        """Add a gradient to that of a value: in place where nobody else holds it."""
        old = self.slots.get(value)
        if old is None:
            self.slots[value] = key
            return
        if self.heap.holds[old] == 1:
            self.heap.drop(key)
            return
        self.slots[value] = self.gradient(max(self.heap.sizes[old], self.heap.sizes[key]))
        self.heap.drop(old)
        self.heap.drop(key)
