"""A rank's whole program as calls on numbered values, in the order in which they run.

    operators     0 linear      1 relu            values   0 x   1 w   2 w gathered   3 y   4 y relu
    calls         s_to_b (1)->2   linear (0, 2)->3   relu (3)->4

Conversions stand at their first use, as `rewrite/rank_program.py` writes them; those that are left to the end
of a step (`rewrite/defer_sync.py`) do nothing here. A value that is a view shares the storage of its *root*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from autopar.convert.moves import MoveAction, canonical, effect, gathers, sums_gradients
from autopar.core.gathering import Gathering
from autopar.core.graph import GraphInput, InputKind, Operator
from autopar.core.move import Move
from autopar.core.placement import Layout, Shard
from autopar.core.strategy import Strategy
from autopar.cost.operators.calls import CallMemory, CallResult, Gradient
from autopar.cost.program.gathering import copies, copy_bytes
from autopar.cost.program.values import leading
from autopar.runtime.collectives.placement_moves import DTYPES

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram

Key = tuple[str, Layout]


@dataclass(frozen=True, slots=True)
class TapeCall:
    """A call of the operator at `place`, the conversions of the outputs at the place after the last;
    its values are those of the tape."""

    place: int
    memory: CallMemory


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter that requires gradients: its value, the bytes of its gradient, and over which ranks that is
    summed when backward ends, None if nowhere; in `reduce`, where that isn't its own dtype. What backward
    comes to with a weight that is gathered once is the `full` gradient, of so many bytes, which is scattered
    first."""

    name: str
    value: int
    nbytes: int
    dtype: torch.dtype
    key: str | None
    full: int = 0
    reduce: torch.dtype | None = None

    @property
    def summed_bytes(self) -> int:
        """Bytes of the gradient in the dtype in which ranks sum it."""
        return self.nbytes * (self.reduce or self.dtype).itemsize // self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StorageOrigin:
    """Memory that operators, or conversions of what they make, give: the tensor that lies in it first, and
    after which call, and how many operators, the program knows it by that name."""

    name: str
    layout: Layout
    call: int
    operators: int


@dataclass(frozen=True, slots=True)
class Tape:
    """`root` and `nbytes` by value: inputs that lie there anyway have none, nor do views. `names` are
    those of the graph's tensors, empty for values inside operators."""

    calls: tuple[TapeCall, ...]
    root: tuple[int, ...]
    nbytes: tuple[int, ...]
    names: tuple[str, ...]
    users: tuple[int, ...]  # values of the user's inputs
    outputs: tuple[int, ...]
    losses: tuple[int, ...]  # the outputs that backward begins with: the loss, or all if there is none
    weights: tuple[Weight, ...]
    gathered: frozenset[int]  # roots that backward regathers
    together: Mapping[int, tuple[int, ...]]  # of those that it regathers by one exchange all of a group's
    copies: int  # bytes of what is gathered once a step, and of its gradients
    fetches: Mapping[int, str]  # calls that bring weights from the host
    fetched: Mapping[int, int]  # of roots that backward regathers, the root that comes from the host for it
    made: Mapping[int, StorageOrigin]  # by root, without what operators alone know


def record(priced: PricedProgram) -> Tape:
    """The program of the rank that is priced, the first; recomputed parts make no difference."""
    return _Recorder(priced).record()


class _Recorder:
    def __init__(self, priced: PricedProgram) -> None:
        self.graph, self.prices, self.program = priced.graph, priced.prices, priced.program
        self.value: dict[Key, int] = {}
        self.on_host: dict[Key, int] = {}  # weights, before they are fetched
        self.root: list[int] = []
        self.nbytes: list[int] = []
        self.names: list[str] = []
        self.calls: list[TapeCall] = []
        self.moves = {
            (name, self.tidy(name, move.target)): move
            for name, moves in self.program.moves.items()
            for move in moves
        }
        self.deferred = self.find_deferred()
        self.deferred_of: dict[str, list[Move]] = {}
        for name, move in self.deferred:
            self.deferred_of.setdefault(name, []).append(move)
        self.gathered: set[int] = set()
        self.together = {name: names for names in self.program.together for name in names}
        self.regathered_together: dict[int, tuple[int, ...]] = {}
        self.fetches: dict[int, str] = {}
        self.fetched: dict[int, int] = {}
        self.made: dict[int, StorageOrigin] = {}
        self.inputs = {item.name for item in self.graph.inputs}
        self.given: set[int] = set()  # their values
        self.copies = {name: each.layout for name, each in copies(priced).items()}
        self.makers = {name: at for at, item in enumerate(self.graph.operators) for name in item.results}
        self.run: set[int] = set()  # operators that are recorded

    def record(self) -> Tape:
        inputs = {item.name: self.input(item) for item in self.graph.inputs}
        self.given = set(inputs.values())
        for place in range(len(self.graph.operators)):
            self.operator(place, place)
        final = len(self.graph.operators)
        outputs = [self.converted(name, self.program.outputs[name], final) for name in self.graph.outputs]
        for buffer, name in self.graph.writes:
            outputs.append(self.converted(name, self.program.inputs[buffer], final))
        return Tape(
            calls=tuple(self.calls),
            root=tuple(self.root),
            nbytes=tuple(self.nbytes),
            names=tuple(self.names),
            users=tuple(inputs[item.name] for item in self.graph.inputs if item.kind is InputKind.USER),
            outputs=tuple(outputs),
            losses=tuple(
                value
                for name, value in zip(self.graph.outputs, outputs, strict=False)
                if self.graph.specs[name].requires_grad and self.graph.loss in (None, name)
            ),
            weights=tuple(
                self.weight(item, inputs[item.name])
                for item in self.graph.inputs
                if item.kind is InputKind.PARAMETER and item.spec.requires_grad and self.prices.training
            ),
            gathered=frozenset(self.gathered),
            together=self.regathered_together,
            copies=sum(copy_bytes(self.prices, name, layout) for name, layout in self.copies.items()),
            fetches=self.fetches,
            fetched=self.fetched,
            made=self.made,
        )

    def operator(self, number: int, place: int) -> None:
        """Record an operator, unless it is, as a part of the one at `place`."""
        if number in self.run:
            return
        self.run.add(number)
        item = self.graph.operators[number]
        strategy = self.program.strategies[item.name]
        operands = [
            self.converted(name, tuple(option.operands[index] for option in strategy), place)
            for index, name in enumerate(item.operands)
        ]
        found = self.prices.calls(item, strategy, **self.apart(item, strategy))
        numbers = dict(enumerate(operands))
        for call in found.calls:
            self.add(place, self.numbered(call, numbers))
        for index, (name, result) in enumerate(zip(item.results, found.results, strict=True)):
            if name is not None and result is not None:
                key = name, self.tidy(name, tuple(option.results[index] for option in strategy))
                self.value[key] = numbers[result]
                self.names[numbers[result]] = name
                self.note(numbers[result], key, place + 1, len(self.calls) - 1)

    def apart(self, item: Operator, strategy: Strategy) -> dict[str, tuple[int, ...]]:
        """Return which operands come from moves, and which results go there, if moves part groups."""
        if self.prices.groups is None:
            return {}
        taken = [tuple(option.operands[index] for option in strategy) for index in range(len(item.operands))]
        inside = self.prices.groups.inside
        moved = (
            index
            for index, (name, layout) in enumerate(zip(item.operands, taken, strict=True))
            if name in inside and (name, self.tidy(name, layout)) in self.moves
        )
        needed = (
            index
            for index, name in enumerate(item.results)
            if name in inside and self.program.moves.get(name)
        )
        return {"moved": tuple(moved), "needed": tuple(needed)}

    def tidy(self, name: str, layout: Layout) -> Layout:
        requires_grad = self.prices.training and self.graph.specs[name].requires_grad
        return canonical(layout, differentiable=requires_grad)

    def new(self, name: str, nbytes: int, root: int | None = None) -> int:
        value = len(self.root)
        self.root.append(value if root is None else self.root[root])
        self.nbytes.append(nbytes)
        self.names.append(name)
        return value

    def note(self, value: int, key: Key, operators: int, call: int) -> None:
        """Remember what the memory that a value begins is called, if it is neither an input's nor a view."""
        if self.root[value] == value and value not in self.given and key[0] not in self.inputs:
            self.made.setdefault(value, StorageOrigin(*key, call, operators))

    def input(self, item: GraphInput) -> int:
        layout = self.program.inputs[item.name]
        copied = item.kind is InputKind.USER and not _is_one_block(item.spec.shape, layout)
        value = self.new(item.name, self.prices.local_bytes(item.name, layout) if copied else 0)
        values = self.on_host if item.name in self.program.on_host else self.value
        values[item.name, self.tidy(item.name, layout)] = value
        return value

    def add(self, place: int, call: CallMemory) -> None:
        self.calls.append(TapeCall(place, call))

    def numbered(self, call: CallMemory, numbers: dict[int, int]) -> CallMemory:
        """Number a call's values as the tape does; `numbers` has those of the call, and gets those that it
        gives."""
        takes = tuple(numbers[value] for value in call.takes)
        gives = []
        for item in call.gives:
            alias = None if item.alias is None else numbers[item.alias]
            numbers[item.value] = self.new("", item.nbytes, alias)
            gives.append(CallResult(numbers[item.value], item.nbytes, alias))
        return replace(
            call,
            takes=takes,
            gives=tuple(gives),
            saves=frozenset(self.root[numbers[value]] for value in call.saves),
            gradients=tuple(
                Gradient(
                    numbers[item.value], item.nbytes, None if item.alias is None else numbers[item.alias]
                )
                for item in call.gradients
            ),
        )

    # -- conversions ------------------------------------------------------------------------------

    def converted(self, name: str, layout: Layout, place: int) -> int:
        """Convert a tensor to `layout`, at most once."""
        key = name, self.tidy(name, layout)
        if key in self.on_host:
            self.add(place, self.fetch(name, key))
        if key not in self.value:
            if name in self.together and gathers(self.moves[key]):
                self.gather_together(self.together[name], place)
            else:
                self.add(place, self.convert(name, self.moves[key], place))
        return self.value[key]

    def fetch(self, name: str, key: Key) -> CallMemory:
        """Make a weight's copy on the device, by the call that is added next; its gradient is on the host."""
        source, nbytes = self.on_host.pop(key), self.prices.local_bytes(*key)
        self.value[key] = value = self.new(name, nbytes)
        self.gathered.add(value)
        self.fetches[len(self.calls)], self.fetched[value] = name, value
        learns = self.prices.training and self.graph.specs[name].requires_grad
        gradients = (Gradient(source, 0, None),) if learns else ()
        return CallMemory(
            (source,), (CallResult(value, nbytes, None),), frozenset(), 0, gradients, repeats=True
        )

    def gather_together(self, names: Sequence[str], place: int) -> None:
        """Add the one call that gathers a group of weights, and the casts before it."""
        for number in (self.makers[name] for name in names if name in self.makers):
            self.operator(number, place)
        each = [self.convert(name, move, place) for name in names for move in self.program.moves[name]]
        gives = tuple(item for call in each for item in call.gives)
        self.add(
            place,
            CallMemory(
                takes=tuple(value for call in each for value in call.takes),
                gives=gives,
                saves=frozenset().union(*(call.saves for call in each)),
                own=0,
                gradients=tuple(item for call in each for item in call.gradients),
                repeats=all(call.repeats for call in each),
            ),
        )
        roots = tuple(item.value for item in gives)
        if self.gathered.issuperset(roots):
            self.regathered_together |= dict.fromkeys(roots, roots)

    def convert(self, name: str, move: Move, place: int) -> CallMemory:
        """Make the value of a conversion, whose call is added next."""
        source = self.converted(name, move.source, place)
        what, deferred = effect(move), (name, move) in self.deferred
        passes = what.forward is MoveAction.NOTHING or deferred  # a copy that is gathered once lies there
        regather = gathers(move) and self.program.gathering(name) is Gathering.REGATHER
        nbytes = 0 if passes else self.prices.local_bytes(name, move.target)
        value = self.new(name, nbytes, source if passes else None)
        gradients: tuple[Gradient, ...] = ()
        scratch = 0
        if self.prices.training and self.graph.specs[name].requires_grad:
            returns = deferred or what.backward is MoveAction.NOTHING
            back = 0 if returns else self.prices.local_bytes(name, move.source)
            gradients = (Gradient(source, back, value if returns else None),)
            scratch = 0 if returns else self.summed_bytes(name, move) - back
        if regather:
            self.gathered.add(value)
            if (fetched := self.fetched.get(self.root[source])) is not None:
                self.fetched[value] = fetched
        given = CallResult(value, nbytes, source if passes else None)
        saves = frozenset(
            {self.root[source]} - self.given - self.gathered if regather else ()
        )  # weights stay
        key = name, self.tidy(name, move.target)
        self.value[key] = value
        self.note(value, key, place, len(self.calls))
        memory = CallMemory((source,), (given,), saves, 0, gradients, repeats=passes or regather)
        return replace(memory, backward_scratch=max(0, scratch))

    def summed_bytes(self, name: str, move: Move) -> int:
        """Bytes of a gradient and its sum over ranks, if they are summed in a dtype other than the
        tensor's."""
        share = self.prices.widening(name)
        if share == 1.0 or not sums_gradients(move):
            return 0
        return round(share * sum(self.prices.local_bytes(name, end) for end in (move.target, move.source)))

    def find_deferred(self) -> set[tuple[str, Move]]:
        """Moves of weights whose gradients are summed when backward ends."""
        needs: dict[str, set[Layout]] = {}
        for item in self.graph.operators:
            for index, name in enumerate(item.operands):
                layout = tuple(option.operands[index] for option in self.program.strategies[item.name])
                needs.setdefault(name, set()).add(self.tidy(name, layout))
        return {
            (item.name, move)
            for item in self.graph.inputs
            if item.kind is InputKind.PARAMETER and item.name not in self.program.on_host
            for move in leading(
                self.tidy(item.name, self.program.inputs[item.name]),
                needs.get(item.name, ()),
                self.program.moves.get(item.name, ()),
                self.program.gathering(item.name),
            )
        }

    def weight(self, item: GraphInput, value: int) -> Weight:
        mesh = self.prices.dims.mesh
        deferred = self.deferred_of.get(item.name, [])
        gathered = {move.axis for move in deferred if gathers(move)}
        axes = {axis for move in deferred for axis in move.axes} - gathered
        summed = math.prod(mesh.shape[axis] for axis in axes) > 1
        nbytes = self.prices.local_bytes(item.name, self.program.inputs[item.name])
        nbytes = 0 if item.name in self.program.on_host else nbytes
        copy = self.copies.get(item.name)
        full = 0 if copy is None else self.prices.local_bytes(item.name, copy)
        key = mesh.key(sorted(axes)) if summed else None
        reduce = None if self.prices.widening(item.name) == 1.0 else DTYPES[self.prices.reduce]
        return Weight(item.name, value, nbytes, item.spec.dtype, key, full, reduce)


def _is_one_block(shape: Sequence[int], layout: Layout) -> bool:
    """Whether a rank's part of a contiguous tensor is one piece of its memory, so that no copy is made."""
    split = [item for item in layout if isinstance(item, Shard)]
    return all(item.atom == 0 and math.prod(shape[: item.dim]) == 1 for item in split)
