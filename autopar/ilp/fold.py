"""Equal blocks are planned once: which operators of a graph repeat, by structure and not by name.

    embed  [ln qkv attn proj add ln fc gelu fc add]  [ln qkv ... add]  ...  [ln qkv ... add]  ln head
            repetition 0                              1                      N - 1

Operators at the same place of the N repetitions form one *class* with one strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autopar.core.graph import Graph, Operator, map_refs
from autopar.core.parallelism import Pins
from autopar.ops.dims import Dims


@dataclass(frozen=True, slots=True)
class Folding:
    """`class_of` names for each operator the operator that stands for its class; `repetition` says
    in which repetition it is (0 outside); `count` is N, 1 if nothing repeats."""

    class_of: Mapping[str, str]
    repetition: Mapping[str, int]
    count: int


def fold(graph: Graph, dims: Dims, pins: Pins | None = None) -> Folding:
    """Find the run of equal blocks that covers most operators; equal ones are pinned alike."""
    operators = graph.operators
    numbers: dict[Any, int] = {}
    signs = tuple(
        numbers.setdefault((_sign(item, graph, dims), pin_of(item, pins or {})), len(numbers))
        for item in operators
    )
    start, period, count = _longest_run(signs)
    while count > 2 and not _same_wiring(graph, start, period, count):
        count -= 1
    if count <= 2:
        return Folding({item.name: item.name for item in operators}, {}, 1)
    class_of, repetition = {item.name: item.name for item in operators}, {}
    for index in range(start, start + period * count):
        place = (index - start) % period
        class_of[operators[index].name] = operators[start + period + place].name
        repetition[operators[index].name] = (index - start) // period
    return Folding(class_of, repetition, count)


def pin_of(operation: Operator, pins: Pins) -> tuple[str | None, ...] | None:
    """What the operator is pinned to, by its own name or its layer's."""
    pin = pins.get(operation.name, pins.get(operation.module))
    return None if pin is None else tuple(pin)


def _sign(operation: Operator, graph: Graph, dims: Dims) -> Any:
    specs, atoms = graph.specs, dims.atoms.of
    args = map_refs((operation.args, operation.kwargs), lambda ref: f"{specs[ref.name]}{atoms[ref.name]}")
    results = tuple(f"{specs[name]}{atoms[name]}" if name else "" for name in operation.results)
    return operation.target, str(args), results


@lru_cache(maxsize=16)  # meshes and sizes of micro-batches mostly don't change what repeats
def _longest_run(signs: tuple[int, ...]) -> tuple[int, int, int]:
    """(start, period, count) of the repetition that leaves fewest distinct operators."""
    best, found = 0, (0, max(1, len(signs)), 1)
    for period in range(1, len(signs) // 2 + 1):
        run = 0
        for index in range(len(signs) - period + 1):
            if index < len(signs) - period and signs[index] == signs[index + period]:
                run += 1
                continue
            count = run // period + 1
            if count > 1 and period * (count - 1) > best:
                best, found = period * (count - 1), (index - run, period, count)
            run = 0
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
