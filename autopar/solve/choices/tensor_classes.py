"""Tensors as the placement program sees them: who makes and takes each, and which are treated alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.convert.network import Network, Numbers, Placements
from autopar.core.graph import Graph, InputKind
from autopar.core.move import Move
from autopar.core.placement import Layout
from autopar.sharding.atoms import Atoms
from autopar.sharding.rule import rule_of
from autopar.solve.choices.direct_ways import DirectWays
from autopar.solve.choices.fold import Folding
from autopar.solve.choices.gather_phases import GatherPhase
from autopar.solve.linear_program import Terms

Marginal = dict[Layout, Terms]


@dataclass(slots=True)
class Use:
    """One place where a tensor class is used: by whom, in which repetitions, and the layouts they need."""

    consumer: str | None  # operator class; None for an output or a buffer
    position: int
    needs: Marginal
    repetitions: frozenset[int] = frozenset()


@dataclass(slots=True)
class TensorClass:
    """Tensors that the plan treats alike; `name` stands for them. For each move of `network` there is the
    variable that pays for it in a phase, or -1; of a tensor that goes straight to its use `ways` instead."""

    name: str
    members: list[str]
    network: Network = field(init=False)
    asked: tuple[Placements, frozenset[Layout]] = field(init=False)  # what the network was asked for
    paid: dict[GatherPhase, Numbers] = field(default_factory=dict)
    ways: DirectWays | None = None

    def used(self, values: Sequence[float], least: float) -> set[Move]:
        """The moves of which an answer makes more than `least`."""
        pairs = itertools.chain.from_iterable(enumerate(each.tolist()) for each in self.paid.values())
        made = {move for move, variable in pairs if variable >= 0 and values[variable] > least}
        return {self.network.move(move) for move in made}


class Wiring:
    """Who makes and takes each tensor of `graph`, and what is written where."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {
            name: (item, i) for item in graph.operators for i, name in enumerate(item.results) if name
        }
        self.uses = graph.consumers()
        self.kinds = {item.name: item for item in graph.inputs}
        self.written = {value: buffer for buffer, value in graph.writes}

    def classes(self, folding: Folding, atoms: Atoms) -> list[TensorClass]:
        """Group tensors with one producer class and the same uses."""
        found: dict[object, TensorClass] = {}
        for name in self.graph.specs:
            if not (self.uses[name] or name in self.graph.outputs or name in self.written):
                continue
            key = self._identity(name, folding, atoms)
            found.setdefault(key, TensorClass(name, [])).members.append(name)
        return list(found.values())

    def _identity(self, name: str, folding: Folding, atoms: Atoms) -> object:
        class_of, repetition = folding.class_of, folding.repetition
        uses = tuple(sorted((class_of[item.name], position) for item, position in self.uses[name]))
        if name in self.graph.outputs or name in self.written:
            return name
        if name in self.kinds:
            item = self.kinds[name]
            users = {use.name for use, _ in self.uses[name]}
            alone = len(users) > 1 and len({repetition.get(user, -1) for user in users}) > 1
            spans = alone or not all(user in repetition for user in users)
            return name if spans else (item.kind, item.mutated, str(item.spec), atoms.of[name], uses)
        operation, index = self.makers[name]
        if operation.name not in repetition:
            return name
        own = repetition[operation.name]
        steps = (
            tuple(
                sorted(
                    (
                        class_of[use.name],
                        pos,
                        repetition[use.name] - own if use.name in repetition else use.name,
                    )
                    for use, pos in self.uses[name]
                )
            )
            if all(use.name in repetition for use, _ in self.uses[name])
            else name
        )
        return class_of[operation.name], index, steps

    def is_fixed(self, name: str) -> bool:
        """Whether the tensor is a buffer that the program writes; its layout is fixed."""
        return name in self.kinds and self.kinds[name].mutated

    def at_rest(self, name: str) -> bool:
        """Whether the tensor is on the device all the time; the user's inputs come and go."""
        return name in self.kinds and self.kinds[name].kind is not InputKind.USER

    def may_be_left(self, name: str) -> bool:
        """Whether ranks may hold their own parts of the tensor: true of constants whose users all read
        values."""
        if name not in self.kinds or self.kinds[name].kind is not InputKind.CONSTANT:
            return False
        return all(rule_of(item).reads_values for item, _ in self.uses[name])

    def is_parameter(self, name: str) -> bool:
        """Whether the tensor is a weight."""
        return name in self.kinds and self.kinds[name].kind is InputKind.PARAMETER
