"""Peak memory of a plan, by replaying one step: what is alive at every moment, in bytes.

    state      weights, gradients, optimizer state, copies that are gathered once: all step long
    kept       converted inputs, outputs and scratch that backward reads: from forward to there
               (of a weight that is gathered again, its shard, which is state)
    working    operands, results and their gradients while an operator runs

R and B hold one copy; a view shares its operand's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.convert.table import Action, effect, gathers
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, InputKind
from autopar.core.placement import Broadcast, Layout, R
from autopar.core.plan import Program
from autopar.cost.gathering import copies, copy_bytes
from autopar.cost.prices import Price, Prices
from autopar.cost.values import find_values

Storage = tuple[str, Layout]


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes per device: `nbytes` = `state` + the most that `kept` and working tensors reach."""

    nbytes: int
    state: int
    kept: int
    by_operator: dict[str, int]  # bytes that each operator keeps for backward


@dataclass(frozen=True, slots=True)
class KeptStorage:
    """Memory that backward reads: `home` is the place of the operator where it first occurs, `keepers`
    those of the operators that keep it."""

    name: str  # a tensor that lies in it
    nbytes: int
    home: int
    keepers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Footing:
    """What operators hold, one by one: storages kept for backward, bytes `own` of each operator that
    nobody else sees, and the `working` bytes beside all that while it runs, forward or backward."""

    kept: tuple[KeptStorage, ...]
    own: tuple[int, ...]
    working: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """Memory that is not at rest: it is made at `home`, -1 if users pass it; `uses` are the places of the
    operators that read it, `keepers` of those whose backward does. What ranks exchanged is `held` when an
    operator is computed again."""

    nbytes: int
    home: int
    held: bool
    uses: tuple[int, ...]
    keepers: tuple[int, ...]


def value_layout(layout: Layout) -> Layout:
    """The layout of the value alone: B is R."""
    return tuple(R if isinstance(item, Broadcast) else item for item in layout)


def peak_memory(graph: Graph, prices: Prices, program: Program) -> Peak:
    """Replay forward and backward of one step of the largest rank."""
    return _Replay(graph, prices, program).run()


def footing(graph: Graph, prices: Prices, program: Program) -> Footing:
    """What each operator of the largest rank holds, for cuts into pipeline stages to add up."""
    return _Replay(graph, prices, program).footing()


def lives(graph: Graph, prices: Prices, program: Program) -> tuple[Life, ...]:
    """All storages of the largest rank that occur in a step, as if nothing were computed again."""
    return _Replay(graph, prices, replace(program, recompute=())).lives()


Step = tuple[list[Storage], list[Storage], set[Storage], int]


class _Replay:
    def __init__(self, graph: Graph, prices: Prices, program: Program) -> None:
        self.graph, self.prices, self.program = graph, prices, program
        self.root: dict[Storage, Storage] = {}
        self.size: dict[Storage, int] = {}
        self.states = {item.name for item in graph.inputs if item.kind is not InputKind.USER}
        self.copies = {
            (name, value_layout(copy.layout)): copy_bytes(graph, prices, name, copy.layout)
            for name, copy in copies(graph, prices, program).items()
        }
        self.shards: dict[Storage, Storage] = {}  # of what is gathered again: what it is gathered from
        self.again = [0] * len(graph.operators)  # bytes that each operator gathers again in backward
        for name, moves in program.moves.items():
            for move in moves:
                if effect(move).forward is Action.NOTHING:
                    self.root[name, value_layout(move.target)] = (name, value_layout(move.source))
                elif gathers(move) and program.gathering(name) is Gathering.AGAIN:
                    self.shards[name, value_layout(move.target)] = (name, value_layout(move.source))

    def storage(self, name: str, layout: Layout) -> Storage:
        key = (name, value_layout(layout))
        while key in self.root and self.root[key] != key:
            key = self.root[key]
        if key not in self.size:
            at_rest = name in self.states and key[1] == value_layout(self.program.inputs[name])
            at_rest |= key in self.copies
            self.size[key] = 0 if at_rest else self.prices.local_bytes(name, key[1])
        return key

    def stays(self, key: Storage) -> Storage:
        """What is kept of a storage: of one that is gathered again, what it is gathered from."""
        while key in self.shards:
            key = self.storage(*self.shards[key])
        return key

    def run(self) -> Peak:
        state = sum(
            self.prices.state_bytes(item.name, self.program.inputs[item.name])
            for item in self.graph.inputs
            if item.kind is not InputKind.USER
        )
        state += sum(self.copies.values())
        steps = [self.step(index) for index in range(len(self.graph.operators))]
        kept, by_operator = self.keep(steps)
        forward = self.forward(steps, kept)
        backward = self.backward(steps) + self.gradient() if self.prices.training else 0
        resident = sum(self.size[key] for key in kept)
        extra = sum(item[3] for item in steps)
        return Peak(state + max(forward, backward), state, resident + extra, by_operator)

    def gradient(self) -> int:
        """The largest gradient of a weight, which is held beside the sum of those before it."""
        if not self.prices.accumulates:
            return 0
        weights = (
            item.name
            for item in self.graph.inputs
            if item.kind is InputKind.PARAMETER and item.spec.requires_grad
        )
        layouts = {**self.program.inputs, **dict(self.copies.keys())}
        return max((self.prices.local_bytes(name, layouts[name]) for name in weights), default=0)

    def footing(self) -> Footing:
        steps = [self.step(index) for index in range(len(self.graph.operators))]
        kept, _ = self.keep(steps)
        homes: dict[Storage, int] = {}
        keepers: dict[Storage, list[int]] = {}
        for place, (operands, results, holds, _) in enumerate(steps):
            for key in (*operands, *results, *holds):
                homes.setdefault(key, place)
            for key in holds:
                keepers.setdefault(key, []).append(place)
        working = [sum(self.size[key] for key in alive) for alive in self.transient(steps, kept)]
        if self.prices.training:
            gradients = [sum(self.size[key] for key in alive) for alive in self.gradients(steps)]
            gradients = list(map(sum, zip(reversed(gradients), self.again, strict=True)))
            working = list(map(max, working, gradients))
        return Footing(
            kept=tuple(
                KeptStorage(key[0], self.size[key], homes[key], tuple(places))
                for key, places in keepers.items()
                if self.size[key]
            ),
            own=tuple(own for _, _, _, own in steps),
            working=tuple(working),
        )

    def lives(self) -> tuple[Life, ...]:
        steps = [self.step(index) for index in range(len(self.graph.operators))]
        homes: dict[Storage, int] = {}
        computed: set[Storage] = set()
        uses: dict[Storage, set[int]] = {}
        keepers: dict[Storage, list[int]] = {}
        for place, (operands, results, holds, _) in enumerate(steps):
            held = self.price(place).kept.held
            for index, key in enumerate(results):
                if key not in operands and index not in held:
                    computed.add(key)
                homes.setdefault(key, place)
            for key in operands:
                uses.setdefault(key, set()).add(place)
            for key in holds:
                keepers.setdefault(key, []).append(place)
        for value in find_values(self.graph, self.program, training=self.prices.training).of.values():
            key = self.storage(value.name, value.layout)
            uses.setdefault(key, set()).update(value.uses)
            homes.setdefault(key, value.home)
        return tuple(
            Life(
                nbytes=self.size[key],
                home=homes[key],
                held=key not in computed,
                uses=tuple(sorted(uses.get(key, ()))),
                keepers=tuple(keepers.get(key, ())),
            )
            for key in homes
            if self.size[key] and key not in self.shards
        )

    def price(self, index: int) -> Price:
        item = self.graph.operators[index]
        return self.prices.operator(item, self.program.strategies[item.name])

    def step(self, index: int) -> Step:
        """(operands, results, kept, own bytes) of an operator."""
        item = self.graph.operators[index]
        strategy, price = self.program.strategies[item.name], self.price(index)
        operands = [
            self.storage(name, tuple(option.operands[place] for option in strategy))
            for place, name in enumerate(item.operands)
        ]
        results = []
        for place, name in enumerate(item.results):
            if name is None:
                continue
            layout = tuple(option.results[place] for option in strategy)
            alias = price.kept.aliases[place] if place < len(price.kept.aliases) else None
            if alias is not None:
                self.root[name, value_layout(layout)] = operands[alias]
            results.append(self.storage(name, layout))
        kept = {operands[place] for place in price.kept.operands}
        kept |= {results[place] for place in price.kept.results if place < len(results)}
        stay = {self.stays(key) for key in kept}
        self.again[index] = sum(self.size[key] for key in kept - stay)
        return operands, results, stay, price.kept.extra_bytes

    def keep(self, steps: list[Step]) -> tuple[set[Storage], dict[str, int]]:
        everything: set[Storage] = set()
        by_operator = {}
        for item, (_, _, kept, extra) in zip(self.graph.operators, steps, strict=True):
            by_operator[item.name] = extra + sum(self.size[key] for key in kept - everything)
            everything |= kept
        return everything, by_operator

    def forward(self, steps: list[Step], kept: set[Storage]) -> int:
        most = resident = 0
        seen: set[Storage] = set()
        for (operands, results, _, own), alive in zip(steps, self.transient(steps, kept), strict=True):
            new = kept.intersection((*operands, *results)) - seen
            seen |= new
            resident += own + sum(self.size[key] for key in new)
            most = max(most, resident + sum(self.size[key] for key in alive))
        return most

    def transient(self, steps: list[Step], kept: set[Storage]) -> Iterator[set[Storage]]:
        """What is alive while each operator runs forward, beside what is kept; always the same set, which
        changes."""
        left = Counter(key for operands, _, _, _ in steps for key in set(operands))
        alive: set[Storage] = set()
        for operands, results, _, _ in steps:
            alive |= {*operands, *results} - kept
            yield alive
            for key in set(operands):
                left[key] -= 1
            alive -= {key for key in alive if not left[key] and key not in results}

    def backward(self, steps: list[Step]) -> int:
        holders = Counter(key for _, _, kept, _ in steps for key in kept)
        resident = sum(self.size[key] for key in holders) + sum(own for _, _, _, own in steps)
        most = resident
        for (_, _, kept, own), again, gradients in zip(
            reversed(steps), reversed(self.again), self.gradients(steps), strict=True
        ):
            most = max(most, resident + again + sum(self.size[key] for key in gradients))
            resident -= own
            for key in kept:
                holders[key] -= 1
                if not holders[key]:
                    resident -= self.size[key]
        return most

    def gradients(self, steps: list[Step]) -> Iterator[set[Storage]]:
        """The storages whose gradients are alive while each operator runs backward, the last one first;
        always the same set, which changes."""
        first: dict[Storage, int] = {}  # of a weight's conversion, whose gradient is converted back there
        for place, (operands, _, _, _) in enumerate(steps):
            for key in operands:
                if key[0] in self.states:
                    first.setdefault(key, place)
        alive: set[Storage] = set()
        for place, (operands, results, _, _) in reversed(list(enumerate(steps))):
            alive |= {key for key in (*operands, *results) if self.size[key]}
            yield alive
            alive -= {*results, *(key for key in operands if first.get(key) == place)}
