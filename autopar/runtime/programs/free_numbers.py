"""Numbers that a program takes anew at each call, and the literals of the program that follow from them.

    mul(x, 0.3000412...)    a mark: 1 - tau      ->    number_0 = self.number_0; mul(x, number_0)

A program that was traced with marks is set beside one that is there: they must be the same, node by node
and literal by literal, with the numbers of that one in the marks' places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from autopar.core.graph import ProcessNumber
from autopar.core.operator_facts import is_random
from autopar.runtime.executable import Executable, StagedExecutable
from autopar.runtime.programs.guards import Guard, NumberSlot
from autopar.runtime.saved.recompute import Recomputed
from autopar.trace.reads.numbers import Formula, NotFreeError, Numbers, Plain, freed, is_number

Made: TypeAlias = Executable | StagedExecutable
_PREFIX = "number_"


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a number: an argument without tensors, by its position, or a slot that was read."""

    argument: int = -1
    slot: NumberSlot | None = None

    @property
    def name(self) -> Any:
        """A key that is equal for equal origins."""
        return self.argument if self.slot is None else self.slot.name

    def read(self, constants: Sequence[Any]) -> Any:
        """The number of a call."""
        return constants[self.argument] if self.slot is None else self.slot.read()


@dataclass(slots=True)
class Free:
    """The numbers of one program: where they come from, and where they go to."""

    origins: tuple[Origin, ...]
    values: tuple[Plain, ...]  # of the last call
    decisions: list[tuple[Formula, bool]]
    literals: list[_Literal]
    _settled: list[Any] = field(default_factory=list)

    @property
    def arguments(self) -> frozenset[int]:
        """The places of those that are arguments."""
        return frozenset(item.argument for item in self.origins if item.slot is None)

    @property
    def slots(self) -> list[NumberSlot]:
        """The slots of the other numbers."""
        return [item.slot for item in self.origins if item.slot is not None]

    def settle(self, constants: Sequence[Any]) -> bool:
        """Let the program be that of a call; False where it isn't one of such numbers."""
        values = tuple(item.read(constants) for item in self.origins)
        if values != self.values or not self._settled:
            if list(map(type, values)) != list(map(type, self.values)) or any(map(_is_nan, values)):
                return False
            settled = self._evaluated(values)
            if settled is None:
                return False
            self.values, self._settled = values, settled
        for literal, value in zip(self.literals, self._settled, strict=True):
            literal.module.__dict__[literal.name] = value
        return True

    def _evaluated(self, values: Sequence[Plain]) -> list[Any] | None:
        """Literals for other numbers; None if Python decides otherwise with them."""
        try:
            if any(bool(formula(values)) is not answer for formula, answer in self.decisions):
                return None
            results = [literal.formula(values) for literal in self.literals]
        except (ArithmeticError, ValueError):
            return None
        kinds = (
            type(result) is literal.source for result, literal in zip(results, self.literals, strict=True)
        )
        if not all(kinds):
            return None
        settled = [literal.kind(result) for result, literal in zip(results, self.literals, strict=True)]
        pairs = zip(self.literals, settled, strict=True)
        # Of chances 0 and 1 nothing is drawn.
        return None if any(literal.draws and not 0 < value < 1 for literal, value in pairs) else settled


@dataclass(frozen=True, slots=True)
class _Literal:
    """A literal of one module's code, which from now on reads its attribute `name`."""

    module: fx.GraphModule
    name: str
    formula: Formula
    source: type  # of what the formula gives
    kind: type  # of the literal
    draws: bool  # random numbers follow from it


class Trial(NamedTuple):
    """The origins of numbers that may be free, and what they are for a program that is there."""

    origins: tuple[Origin, ...]
    before: tuple[Plain, ...]

    @property
    def name(self) -> frozenset[Any]:
        """A key that is equal for equal origins."""
        return frozenset(item.name for item in self.origins)

    @contextmanager
    def traced(self, constants: tuple[Any, ...]) -> Iterator[tuple[Numbers, tuple[Any, ...]]]:
        """Put stand-ins for any value in the places of the numbers; yields them and the call's constants."""
        values = [item.read(constants) for item in self.origins]
        numbers, inside = Numbers(values, self.before), list(constants)
        try:
            for origin, stand_in in zip(self.origins, numbers.items, strict=True):
                if origin.slot is None:
                    inside[origin.argument] = stand_in
                else:
                    origin.slot.write(stand_in)
            with freed(numbers):
                yield numbers, tuple(inside)
        finally:
            for origin, value in zip(self.origins, values, strict=True):
                if origin.slot is not None:
                    origin.slot.write(value)


def trial(
    guard: Guard, known: tuple[Any, ...], constants: tuple[Any, ...], free: Free | None
) -> Trial | None:
    """The numbers by which a call differs from one with the `known` constants, and those that are `free`
    already; None if it differs otherwise."""
    changed = guard.numbers()
    if changed is None or len(known) != len(constants):
        return None
    before: dict[Any, tuple[Origin, Plain]] = {}
    for slot, value in changed:
        before[slot.name] = Origin(slot=slot), value
    for place, (then, now) in enumerate(zip(known, constants, strict=True)):
        if type(then) is not type(now):
            return None
        if is_number(now) and repr(then) != repr(now):
            before[place] = Origin(place), then
    if free is not None:
        before |= {item.name: (item, value) for item, value in zip(free.origins, free.values, strict=True)}
    if not before:
        return None
    return Trial(tuple(item for item, _ in before.values()), tuple(value for _, value in before.values()))


def check_alike(made: Made, known: Made, numbers: Numbers) -> None:
    """Raise NotFreeError unless `made`, with marks, is `known` for the numbers that this one is of."""
    numbers.check()
    if type(made) is not type(known) or made.cutting != known.cutting:
        raise NotFreeError("another cut of the batch")
    for ours, theirs in zip_longest(_programs(made), _programs(known)):
        if ours is None or theirs is None or not _are_alike(ours, theirs, numbers):
            raise NotFreeError("another program")


def bind(made: Made, numbers: Numbers, origins: Sequence[Origin]) -> Free:
    """Let the program read its numbers from now on."""
    literals: list[_Literal] = []
    for program in _programs(made):
        parts = {id(item.body): item for item in program.module.modules() if isinstance(item, Recomputed)}
        for module in program.module.modules():
            if isinstance(module, fx.GraphModule):
                read = _reading(module, numbers)
                literals += read
                if read and id(module) in parts:
                    parts[id(module)].numbers = tuple(literal.name for literal in read)
    return Free(tuple(origins), numbers.values, numbers.decisions, literals)


def _programs(made: Made) -> Iterator[Executable]:
    if isinstance(made, Executable):
        yield made
    else:
        yield from (*made.stages, *made.shorter)


def _graphs(program: Executable) -> list[fx.GraphModule]:
    return [item for item in program.module.modules() if isinstance(item, fx.GraphModule)]


def _are_alike(ours: Executable, theirs: Executable, numbers: Numbers) -> bool:
    same = _signature(ours) == _signature(theirs)
    constants = ours.constants.keys() == theirs.constants.keys() and all(
        torch.equal(value, theirs.constants[name]) for name, value in ours.constants.items()
    )
    if not same or not constants:
        return False
    pairs = zip_longest(_graphs(ours), _graphs(theirs))
    return all(
        mine is not None and other is not None and _same_code(mine, other, numbers) for mine, other in pairs
    )


def _signature(program: Executable) -> tuple[Any, ...]:
    results: Any = program.rebuild
    own = (program.inputs, program.outputs, program.writes, program.samples, program.received, program.sent)
    return *own, program.stage, program.cutting, results.__self__


def _same_code(ours: fx.GraphModule, theirs: fx.GraphModule, numbers: Numbers) -> bool:
    """Whether two graphs are the same, literal by literal."""
    nodes = zip_longest(_calls(ours), _calls(theirs))
    return all(
        mine is not None
        and other is not None
        and (mine.op, mine.target, mine.name) == (other.op, other.target, other.name)
        and _same(mine.args, other.args, theirs, numbers)
        and _same(mine.kwargs, other.kwargs, theirs, numbers)
        for mine, other in nodes
    )


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if not _is_read(node)]


def _is_read(node: fx.Node) -> bool:
    return node.op == "get_attr" and str(node.target).startswith(_PREFIX)


def _same(ours: Any, theirs: Any, module: fx.GraphModule, numbers: Numbers) -> bool:
    if isinstance(theirs, fx.Node) and _is_read(theirs):
        theirs = module.__dict__[str(theirs.target)]
    if isinstance(ours, fx.Node):
        return isinstance(theirs, fx.Node) and ours.name == theirs.name
    if isinstance(ours, (tuple, list)):
        return (
            isinstance(theirs, (tuple, list))
            and len(ours) == len(theirs)
            and all(_same(mine, other, module, numbers) for mine, other in zip(ours, theirs, strict=True))
        )
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(
            _same(value, theirs[key], module, numbers) for key, value in ours.items()
        )
    if isinstance(ours, slice):
        parts = ((ours.start, theirs.start), (ours.stop, theirs.stop), (ours.step, theirs.step))
        return all(_same(mine, other, module, numbers) for mine, other in parts)
    was = ours if isinstance(ours, ProcessNumber) else numbers.as_before(ours)
    return type(was) is type(theirs) and bool(was == theirs or (_is_nan(was) and _is_nan(theirs)))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _reading(module: fx.GraphModule, numbers: Numbers) -> list[_Literal]:
    """Put reads in the places of marks."""
    literals: list[_Literal] = []

    def put(node: fx.Node, tree: Any) -> Any:
        match tree:
            case tuple() | list():
                return type(tree)([put(node, item) for item in tree])
            case dict():
                return {key: put(node, item) for key, item in tree.items()}
        formula = numbers.formula(tree) if is_number(tree) else None
        if formula is None:
            return tree
        name = f"{_PREFIX}{len(literals)}"
        source = type(formula(numbers.values))
        random = is_random(node.target)
        literals.append(_Literal(module, name, formula, source, type(tree), random))
        module.__dict__[name] = tree
        with module.graph.inserting_before(node):
            return module.graph.create_node("get_attr", name)

    for node in list(module.graph.nodes):
        if node.op == "call_function":
            node.args, node.kwargs = put(node, tuple(node.args)), put(node, dict(node.kwargs))
    if literals:
        module.recompile()
    return literals
