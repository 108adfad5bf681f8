"""Parts of several assignments joined to one: each runs some of the operators, and the tensors that cross.

    assignment A, lean     o o o o o o|                |o o o o
    assignment B, fast                |o o o o o o o o|
                                     seam             seam

Every tensor is made as the assignment of its maker says and taken as those of its users say. Its conversions
are what the users' assignments do from there. Where these say nothing, as they make it in another layout, or
contradict each other, there is no seam, or new conversions join them. The operators that share an input which
assignments keep differently, a tied weight, all follow the first assignment, and with them their neighbours
as far as it takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from autopar.convert.moves import canonical
from autopar.convert.path import tree
from autopar.core.gathering import Gathering
from autopar.core.graph import Graph
from autopar.core.move import Move
from autopar.core.placement import Layout
from autopar.core.program import Program
from autopar.cost.operators.prices import Prices
from autopar.errors import RuleError

Levels = Sequence[int]  # of each operator the number of its assignment
Need = tuple[int, Layout]  # what an operator of an assignment takes


@dataclass(frozen=True)
class Mixture:
    """Assignments of one graph, of which each operator that isn't `settled` may follow one. With `joins`
    tensors between operators for which assignments have no conversions get new ones."""

    programs: Sequence[Program]
    prices: Prices
    joins: bool = False
    users: dict[str, list[tuple[int, int]]] = field(init=False)  # of a tensor: operator and position
    made_by: dict[str, tuple[int, int]] = field(init=False)  # operator and result

    @property
    def graph(self) -> Graph:
        return self.prices.graph

    def __post_init__(self) -> None:
        users: dict[str, list[tuple[int, int]]] = {name: [] for name in self.graph.specs}
        made_by: dict[str, tuple[int, int]] = {}
        for place, item in enumerate(self.graph.operators):
            for position, name in enumerate(item.operands):
                users[name].append((place, position))
            made_by |= {name: (place, index) for index, name in enumerate(item.results) if name}
        object.__setattr__(self, "users", users)
        object.__setattr__(self, "made_by", made_by)

    def program(self, levels: Levels) -> Program | None:
        """The program in which each operator follows its assignment, but for those that are settled; None if
        there is none."""
        if len(set(levels)) == 1:
            return self.programs[levels[0]]
        levels = self.settle(levels)
        inputs, moves, gatherings = {}, {}, {}
        for item in self.graph.inputs:
            found = self.given(item.name, levels)
            if found is None:
                return None
            inputs[item.name], moves[item.name], gathering = found
            if gathering is not Gathering.KEEP:
                gatherings[item.name] = gathering
        for name in self.made_by:
            made = self.made(name, levels)
            if made is None:
                return None
            moves[name] = made
            gathering = self.programs[levels[self.made_by[name][0]]].gathering(name)
            if gathering is not Gathering.KEEP:
                gatherings[name] = gathering
        strategies = {
            item.name: self.programs[level].strategies[item.name]
            for item, level in zip(self.graph.operators, levels, strict=True)
        }
        last = self.programs[levels[-1]]
        return replace(
            last, inputs=inputs, strategies=strategies, moves=moves, gatherings=gatherings, recompute=()
        )

    def seams(self, places: Sequence[int]) -> tuple[int, ...]:
        """The places, of `places`, at which operators may turn from any assignment to any other.

        The ends of the graph are among them.
        """
        crossing = self.crossing(places)
        ways = [each for each in product(range(len(self.programs)), repeat=2) if each[0] != each[1]]

        def is_seam(place: int) -> bool:
            return not crossing[place] or all(
                self.holds(name, levels)
                for levels in (self.settle(self.turning(place, *way)) for way in ways)
                for name in crossing[place]
            )

        return tuple(place for place in places if is_seam(place))

    def turning(self, place: int, before: int, behind: int) -> list[int]:
        """The levels if operators turn from one assignment to another at a place."""
        return [before] * place + [behind] * (len(self.graph.operators) - place)

    def settle(self, levels: Levels) -> Levels:
        """Copy the levels with 0, the first assignment, where operators follow that anyhow."""
        if not self.settled:
            return levels
        return [0 if place in self.settled else level for place, level in enumerate(levels)]

    @cached_property
    def settled(self) -> frozenset[int]:
        """The operators, by number, that follow the first assignment."""
        found: set[int] = set()
        others = range(1, len(self.programs))
        for item in self.graph.inputs:
            users = sorted({place for place, _ in self.users[item.name]})
            ways = [way for level in others for way in ((level, 0), (0, level))]
            turns = (self.turning(place, *way) for place in users[1:] for way in ways)
            if any(not self.holds(item.name, levels) for levels in turns):
                found.update(users)
        waiting = sorted(found)
        while waiting:
            operator = self.graph.operators[waiting.pop()]
            mixed = [
                [0 if place in found else level for place in range(len(self.graph.operators))]
                for level in others
            ]
            for name in dict.fromkeys((*operator.operands, *filter(None, operator.results))):
                if not all(self.holds(name, levels) for levels in mixed):
                    neighbors = {user for user, _ in self.users[name]}
                    neighbors.update([self.made_by[name][0]] if name in self.made_by else [])
                    waiting += sorted(neighbors - found)
                    found |= neighbors
        return frozenset(found)

    def holds(self, name: str, levels: Levels) -> bool:
        """Whether one layout of the tensor fits its maker and its users."""
        return (self.made if name in self.made_by else self.given)(name, levels) is not None

    def crossing(self, places: Sequence[int]) -> dict[int, list[str]]:
        """Tensors that operators on both sides of each place make or take."""
        found: dict[int, list[str]] = {place: [] for place in places}
        for name, uses in self.users.items():
            touched = [place for place, _ in uses]
            touched += [self.made_by[name][0]] if name in self.made_by else []
            touched += [len(self.graph.operators) - 1] if name in self.ends else []
            if touched:
                low, high = (bisect_right(places, end) for end in (min(touched), max(touched)))
                for place in places[low:high]:
                    found[place].append(name)
        return found

    @cached_property
    def ends(self) -> frozenset[str]:
        """The tensors that are taken when the graph ends."""
        return frozenset((*self.graph.outputs, *(value for _, value in self.graph.writes)))

    def made(self, name: str, levels: Levels) -> tuple[Move, ...] | None:
        """The conversions of what an operator makes."""
        place, index = self.made_by[name]
        level = levels[place]
        options = self.programs[level].strategies[self.graph.operators[place].name]
        source = self.tidy(name, tuple(option.results[index] for option in options))
        return self.moves(name, source, level, self.needs(name, levels))

    def given(self, name: str, levels: Levels) -> tuple[Layout, tuple[Move, ...], Gathering] | None:
        """An input's stored layout, with its conversions, as the assignment of one of its users has it."""
        needs = self.needs(name, levels)
        for level in dict.fromkeys([level for level, _ in needs] or [levels[-1]]):
            layout = self.programs[level].inputs[name]
            moves = self.moves(name, self.tidy(name, layout), level, needs)
            if moves is not None:
                return layout, moves, self.programs[level].gathering(name)
        return None

    def needs(self, name: str, levels: Levels) -> list[Need]:
        """The layouts in which a tensor is taken, each with the assignment that says so."""
        found = []
        for place, position in self.users[name]:
            options = self.programs[levels[place]].strategies[self.graph.operators[place].name]
            layout = tuple(option.operands[position] for option in options)
            found.append((levels[place], self.tidy(name, layout)))
        last = self.programs[levels[-1]]
        if name in self.graph.outputs:
            found.append((levels[-1], self.tidy(name, last.outputs[name])))
        found += [
            (levels[-1], self.tidy(name, last.inputs[buffer]))
            for buffer, value in self.graph.writes
            if value == name
        ]
        return list(dict.fromkeys(found))

    def moves(self, name: str, source: Layout, maker: int, needs: Iterable[Need]) -> tuple[Move, ...] | None:
        """A tree of conversions from `source` to all that is needed; None if assignments have no such."""
        needs = list(needs)
        found = self.known_moves(name, source, maker, needs)
        if found is None and self.joins and name in self.made_by:
            return self.new_moves(name, source, [need for _, need in needs])
        return found

    def known_moves(
        self, name: str, source: Layout, maker: int, needs: Iterable[Need]
    ) -> tuple[Move, ...] | None:
        """Conversions that assignments have, the users' or the maker's."""
        chosen: dict[Layout, Move] = {}
        for level, need in needs:
            ways = (self.way(name, source, need, each) for each in (level, maker))
            way = next((each for each in ways if each is not None), None)
            if way is None:
                return None
            for move in way:
                if chosen.setdefault(move.target, move) != move:
                    return None
        return tuple(chosen.values())

    def new_moves(self, name: str, source: Layout, needs: Sequence[Layout]) -> tuple[Move, ...] | None:
        """Find the cheapest conversions from `source` to the needs."""
        try:
            return tree(
                source,
                needs,
                lambda move: self.prices.move(name, move),
                legal=lambda layout: self.prices.dims.legal(name, layout),
                differentiable=self.prices.training and self.graph.specs[name].requires_grad,
            )
        except RuleError:
            return None

    def way(self, name: str, source: Layout, need: Layout, level: int) -> list[Move] | None:
        """The conversions by which an assignment leads from one layout to another."""
        into = {move.target: move for move in self.programs[level].moves.get(name, ())}
        found: list[Move] = []
        while need != source:
            if need not in into or len(found) > len(into):
                return None
            found.append(into[need])
            need = into[need].source
        return found[::-1]

    def tidy(self, name: str, layout: Layout) -> Layout:
        requires_grad = self.prices.training and self.graph.specs[name].requires_grad
        return canonical(layout, differentiable=requires_grad)


def is_placed_alike(one: Program, other: Program) -> bool:
    """Whether two programs differ at most in what they recompute."""
    return replace(one, recompute=(), offload=()) == replace(other, recompute=(), offload=())
