"""Equal blocks are planned once: which operators of a graph repeat, by structure and not by name.

    embed  [ln qkv attn proj add ln fc gelu fc add]  [ln qkv ... add]  ...  [ln qkv ... add]  ln head
            repetition 0                              1                      N - 1

Operators at the same place of the N repetitions form one *class* with one strategy. An encoder and a
decoder, or the levels of a convolutional net, are several such runs, with classes of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.core.force import Pins
from autopar.core.graph import Graph, InputKind, Operator
from autopar.core.placement import Layout
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import text_of

LEAST_FOLDED_OPERATORS = 8  # that a run makes superfluous: fewer aren't worth a plan of less freedom


@dataclass(frozen=True, slots=True)
class Folding:
    """`class_of` names for each operator the operator that stands for its class; `repetition` says
    in which repetition of its run it is (none outside); `count` are all repetitions, 1 if nothing repeats."""

    class_of: Mapping[str, str]
    repetition: Mapping[str, int]
    count: int


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Equal blocks of `period` operators, one behind the other from number `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


def fold(
    graph: Graph,
    dims: Dims,
    pins: Pins | None = None,
    roles: Mapping[str, object] | None = None,
    stored: Mapping[str, Layout] | None = None,
    on_host: Collection[str] = (),
) -> Folding:
    """Find the run of equal blocks that covers most operators, then others before and behind it; equal ones
    are pinned alike, have the same role, if any, in what a compiler fuses, and weights that lie alike where
    these are `stored` (by target) already, and in the same memory, the device's or the host's."""
    operators = graph.operators
    states = (item for item in graph.inputs if item.kind is not InputKind.USER)
    lie = {item.name: ((stored or {}).get(item.target, ""), item.name in on_host) for item in states}
    numbers: dict[Any, int] = {}
    signs = tuple(
        numbers.setdefault(
            (_sign(item, graph, dims, lie), pin_of(item, pins or {}), (roles or {}).get(item.name)),
            len(numbers),
        )
        for item in operators
    )
    runs = _runs(graph, signs, 0, len(signs))
    class_of, repetition = {item.name: item.name for item in operators}, {}
    for run in runs:
        for index in range(run.start, run.stop):
            block, place = divmod(index - run.start, run.period)
            # The first block may take what others don't.
            class_of[operators[index].name] = operators[run.start + run.period + place].name
            repetition[operators[index].name] = block
    return Folding(class_of, repetition, sum(run.count for run in runs) or 1)


def _runs(graph: Graph, signs: tuple[int, ...], first: int, stop: int) -> list[BlockRun]:
    """The runs among the operators [first, stop), in order."""
    start, period, count = _longest_run(signs[first:stop])
    start += first
    while count > 2 and not _same_wiring(graph, start, period, count):
        count -= 1
    run = BlockRun(start, period, count)
    whole = stop - first == len(signs)
    if count <= 2 or not whole and period * (count - 1) < LEAST_FOLDED_OPERATORS:
        return []
    return [*_runs(graph, signs, first, run.start), run, *_runs(graph, signs, run.stop, stop)]


def pin_of(operation: Operator, pins: Pins) -> tuple[str | None, ...] | None:
    """Factors to which the operator is pinned, by its own name or its layer's."""
    pin = pins.get(operation.name, pins.get(operation.module))
    return None if pin is None else tuple(pin)


def _sign(operation: Operator, graph: Graph, dims: Dims, lie: Mapping[str, tuple[Any, bool]]) -> Any:
    specs, atoms = graph.specs, dims.atoms.of
    args = text_of(operation, lambda name: f"{specs[name]}{atoms[name]}{lie.get(name, '')}")
    results = tuple(f"{specs[name]}{atoms[name]}" if name else "" for name in operation.results)
    return operation.target, args, results


@lru_cache(maxsize=64)  # meshes and sizes of micro-batches mostly don't change what repeats
def _longest_run(signs: tuple[int, ...]) -> tuple[int, int, int]:
    """(start, period, count) of the repetition that leaves fewest distinct operators."""
    best, found = 0, (0, max(1, len(signs)), 1)
    numbers = np.array(signs, dtype=np.intp)
    for period in range(1, len(signs) // 2 + 1):
        if len(signs) - period <= best:
            break  # no run of longer blocks spares more
        unlike = np.flatnonzero(numbers[:-period] != numbers[period:])
        ends = np.concatenate([[-1], unlike, [len(signs) - period]])
        spared = np.diff(ends) - 1  # operators that are like those a period later, run by run
        spared -= spared % period
        longest = int(np.argmax(spared))
        if spared[longest] > best:
            best = int(spared[longest])
            found = (int(ends[longest]) + 1, period, best // period + 1)
    return found


def _same_wiring(graph: Graph, start: int, period: int, count: int) -> bool:
    """Whether repetitions 1 to count - 1 read their operands from the same places."""
    place = {name: index for index, item in enumerate(graph.operators) for name in item.results if name}
    fixed = {item.name: item.kind for item in graph.inputs}
    uses = graph.consumers()

    def source(name: str, index: int) -> Any:
        if name in fixed:
            return ("input", fixed[name], len(uses[name]) > 1 and name)
        made = place[name]
        inside = start <= made < start + period * count
        return ("inside", index - made) if inside else ("outside", name)

    for index in range(start + period, start + period * (count - 1)):
        ours = [source(name, index) for name in graph.operators[index].operands]
        theirs = [source(name, index + period) for name in graph.operators[index + period].operands]
        if ours != theirs:
            return False
    return True
