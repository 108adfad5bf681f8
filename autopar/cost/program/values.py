"""Every tensor of a program in every layout that it takes: where it is made, where it is used.

    operators       0        1        2        3
    h       S ------|--------'                            made by 0, used by 1 and by its conversion
    h       R                         '--------'          converted at its first use, by 2

A value is *free* if every pipeline stage can make it for itself: what depends on weights alone, and what
has no gradient and depends on the user's inputs alone (masks, positions). All others are made in one place.
`rewrite/split_stages.py` cuts programs by the same rules, but that it hands on what comes from written
buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.convert.moves import canonical, effect, gathers
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph, InputKind
from autopar.core.move import Move
from autopar.core.operator_facts import is_random
from autopar.core.placement import Layout
from autopar.core.program import Program

Key = tuple[str, Layout]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in one layout; places are numbers of operators, outputs of the graph leave at the last.

    `maker` is the operator that makes it, -1 for an input; `uses` are the places of operators and conversions
    that take it, in order; `carriers` operators with a `maker` that need it, through free values too.
    `move` made it from another layout, `leads` if that is done once a step (rewrite/defer_sync.py).
    """

    name: str
    layout: Layout
    maker: int
    uses: tuple[int, ...]
    carriers: tuple[int, ...]
    move: Move | None
    leads: bool
    free: bool


@dataclass(frozen=True, slots=True)
class Values:
    """All values; `carriers` are, for each operator, the places of those with a `maker` that need its
    results; `free` the tensors that every stage can make."""

    of: Mapping[Key, Value]
    sources: Mapping[str, Layout]  # of each tensor the layout in which it is made
    carriers: Mapping[str, tuple[int, ...]]
    free: frozenset[str]

    def source(self, name: str) -> Value:
        """The tensor as it is made."""
        return self.of[name, self.sources[name]]


def find_values(graph: Graph, program: Program, *, training: bool) -> Values:
    """The values that the programs of all ranks consist of, stage borders aside."""
    return _ValueFinder(graph, program, training).find()


class _ValueFinder:
    def __init__(self, graph: Graph, program: Program, training: bool) -> None:
        self.graph, self.program, self.training = graph, program, training
        self.final = len(graph.operators) - 1
        self.free = free_tensors(graph)
        self.sources: dict[str, tuple[Layout, int]] = {}
        self.needs: dict[str, dict[Layout, list[int]]] = {name: {} for name in graph.specs}
        self.parameters = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
        self.values: dict[Key, Value] = {}
        self.carriers: dict[str, tuple[int, ...]] = {}

    def tidy(self, name: str, layout: Layout) -> Layout:
        return canonical(layout, differentiable=self.training and self.graph.specs[name].requires_grad)

    def find(self) -> Values:
        for given in self.graph.inputs:
            self.sources[given.name] = self.tidy(given.name, self.program.inputs[given.name]), -1
        for place, item in enumerate(self.graph.operators):
            strategy = self.program.strategies[item.name]
            for index, name in enumerate(item.operands):
                self.need(name, tuple(option.operands[index] for option in strategy), place)
            for index, result in enumerate(item.results):
                if result:
                    layout = tuple(option.results[index] for option in strategy)
                    self.sources[result] = self.tidy(result, layout), place
        for name in self.graph.outputs:
            self.need(name, self.program.outputs[name], self.final)
        for buffer, value in self.graph.writes:
            self.need(value, self.program.inputs[buffer], self.final)
        for operation in reversed(self.graph.operators):
            made = [self.settle(result) for result in operation.results if result]
            self.carriers[operation.name] = _union([value.carriers for value in made])
        for given in self.graph.inputs:
            self.settle(given.name)
        layouts = {name: layout for name, (layout, _) in self.sources.items()}
        return Values(self.values, layouts, self.carriers, self.free)

    def need(self, name: str, layout: Layout, place: int) -> None:
        self.needs[name].setdefault(self.tidy(name, layout), []).append(place)

    def settle(self, name: str) -> Value:
        """Find the values of a tensor whose users are settled already."""
        source, maker = self.sources[name]
        children: dict[Layout, list[Move]] = {}
        for move in self.program.moves.get(name, ()):
            children.setdefault(move.source, []).append(move)
        direct = self.needs[name]

        moves, gathering = self.program.moves.get(name, ()), self.program.gathering(name)
        first: list[Move] = []
        if name in self.parameters and name not in self.program.on_host:
            first = leading(source, direct, moves, gathering)

        def visit(layout: Layout, move: Move | None) -> Value:
            onward = children.get(layout, [])
            below = [visit(each.target, each) for each in onward]
            uses = sorted({*direct.get(layout, ()), *(value.maker for value in below)})
            users = [self.needed_by(place) for place in direct.get(layout, ())]
            found = Value(
                name=name,
                layout=layout,
                maker=maker if move is None else min(uses, default=self.final),
                uses=tuple(uses),
                carriers=_union([*users, *(value.carriers for value in below)]),
                move=move,
                leads=move in first,
                free=name in self.free,
            )
            self.values[name, layout] = found
            return found

        return visit(source, None)

    def needed_by(self, place: int) -> tuple[int, ...]:
        """The operator itself; one that every stage can duplicate is replaced by its consumers."""
        operation = self.graph.operators[place]
        made = [name for name in operation.results if name]
        if made and all(name in self.free for name in made):
            return self.carriers.get(operation.name) or (place,)  # none yet: the last one's results leave
        return (place,)


def leading(
    source: Layout, needs: Collection[Layout], moves: Sequence[Move], gathering: Gathering = Gathering.KEEP
) -> list[Move]:
    """A weight's moves from `source` that are made once a step: `r_to_b`, left to its end, and the gathers of
    a weight that is gathered once; each the only use of what is before it (defer_sync.py)."""
    found: list[Move] = []
    while source not in needs:
        onward = [move for move in moves if move.source == source]
        if len(onward) != 1 or not can_lead(onward[0], gathering):
            break
        found += onward
        source = onward[0].target
    return found


def can_lead(move: Move, gathering: Gathering) -> bool:
    """Whether a weight's first move from its stored layout can be made once a step."""
    return effect(move).name == "r_to_b" or (gathering is Gathering.ONCE and gathers(move))


def free_tensors(graph: Graph) -> frozenset[str]:
    """The tensors, inputs included, that every stage can make for itself."""
    made_from = {item.name: frozenset({item.kind}) for item in graph.inputs}
    for item in graph.operators:
        if is_random(item.target) or not made_from.keys() >= set(item.operands):
            continue
        sources: frozenset[InputKind] = frozenset().union(*(made_from[name] for name in item.operands))
        requires_grad = any(graph.specs[name].requires_grad for name in item.results if name)
        shared = InputKind.PARAMETER in sources or requires_grad
        if InputKind.USER not in sources or not shared:
            made_from |= {name: sources for name in item.results if name}
    return frozenset(made_from)


def _union(places: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*places)))
