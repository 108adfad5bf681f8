"""The calls that an operator's rule writes for one rank, each as what it does to memory.

    conv2d, split in height          exchange -> conv2d              values, by number
    takes (0)     gives 2            new storage, nothing saved      0 x, 1 weight | 2 with halo, 3 y
    takes (2, 1)  gives 3            new storage, saves 2 and 1

Backward runs through the calls the other way round: each takes the gradients of what it gave and gives
those of what it took, some in the same storage (of a view, of both operands of a sum).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.convert.moves import EFFECTS, MoveAction
from autopar.core.operator_facts import facts_of
from autopar.cost.operators.halo_convolution import strip_bytes
from autopar.cost.operators.saved import stand_ins
from autopar.rewrite.emit import GraphEmitter, LocalCall
from costdb.footprint import footprint
from costdb.slopes import passes


@dataclass(frozen=True, slots=True)
class CallResult:
    """A value that a call gives: in `nbytes` of new storage, or in that of value `alias`."""

    value: int
    nbytes: int
    alias: int | None = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a value that a call took: `nbytes` of new storage, or that of the gradient of value
    `alias`, which the call gave."""

    value: int
    nbytes: int
    alias: int | None = None


@dataclass(frozen=True, slots=True)
class CallMemory:
    """One call. Until its backward are saved the storages of the values `saves` and `own` bytes that
    nobody else sees. `repeats` is whether it runs again inside a part that is recomputed. The
    scratch is what it needs in passing beside what it gives and saves, forward and backward."""

    takes: tuple[int, ...]
    gives: tuple[CallResult, ...]
    saves: frozenset[int]
    own: int
    gradients: tuple[Gradient, ...]
    repeats: bool = True
    forward_scratch: int = 0
    backward_scratch: int = 0


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """All calls of an operator in order. Values are numbered, the operands first; `results` are the
    numbers of the operator's results."""

    calls: tuple[CallMemory, ...]
    results: tuple[int | None, ...]


def read_calls(
    emitter: GraphEmitter, values: Sequence[fx.Node], results: Sequence[Any], kind: str
) -> OperatorCalls:
    """The calls that a rule wrote for operands `values`, on a device of `kind`."""
    return _CallReader(emitter, values, kind).read(results)


class _CallReader:
    def __init__(self, emitter: GraphEmitter, values: Sequence[fx.Node], kind: str) -> None:
        self.emitter, self.kind = emitter, kind
        self.number = {node: place for place, node in enumerate(values)}
        self.local = {item.results[0]: item for item in emitter.written if item.results}
        self.strips = strip_bytes(emitter)
        self.doubles = {item.results[0]: item for item in stand_ins(emitter)}

    def read(self, results: Sequence[Any]) -> OperatorCalls:
        calls = tuple(self.calls())
        return OperatorCalls(calls, tuple(self.number.get(node) for node in results))

    def calls(self) -> Iterator[CallMemory]:
        for node in self.emitter.graph.nodes:
            if node in self.local:
                yield self.written(self.local[node])
            elif node.op == "call_function" and node in self.emitter.meta and not _is_part(node):
                yield self.collective(node)

    def written(self, item: LocalCall) -> CallMemory:
        """A local call, or a draw of autopar's own."""
        places = tuple(self.number.get(node) for node in item.operands)  # None: held from the start
        if not item.is_local:
            takes = tuple(place for place in places if place is not None)
            return CallMemory(takes, self.given(item.results), frozenset(), 0, ())
        call = item.call
        found, both = footprint(call, self.kind), passes(call, self.kind)
        gives = self.given(
            item.results, [None if alias is None else places[alias] for alias in found.aliases]
        )
        whole = facts_of(call.target).whole_first and self.nbytes(item.operands[0])
        if whole and self.nbytes(item.results[0]) < whole:
            gives = (replace(gives[0], nbytes=whole),)
        numbers = [each.value for each in gives]
        saves = {taken for place in found.saved.operands if (taken := places[place]) is not None}
        saves |= {numbers[place] for place in found.saved.results}
        gradients = tuple(
            Gradient(taken, slope.nbytes, None if slope.alias is None else numbers[slope.alias])
            for taken, slope in zip(places, both.slopes, strict=True)
            if slope is not None and taken is not None
        )
        new, slopes = sum(each.nbytes for each in gives), sum(each.nbytes for each in gradients)
        scratch = facts_of(call.target).scratch
        ahead, back = scratch(call.args) if scratch else (0, 0)
        return CallMemory(
            tuple(place for place in places if place is not None),
            gives,
            frozenset(saves),
            found.saved.extra_bytes,
            gradients,
            forward_scratch=max(0, both.forward_bytes - new - found.saved.extra_bytes) + ahead,
            backward_scratch=max(0, both.backward_bytes - slopes) + back,
        )

    def collective(self, node: fx.Node) -> CallMemory:
        """A move, a halo, or an operator of autopar's own with one inside."""
        effect = EFFECTS.get(str(node.target).split(".")[1])
        inputs = [
            item for item in node.all_input_nodes if item in self.number
        ]  # the rest is held from the start
        takes = tuple(self.number[item] for item in inputs)
        passed = takes[0] if effect and effect.forward is MoveAction.NOTHING else None
        gives = self.given((node,), [passed])
        returned = gives[0].value if effect and effect.backward is MoveAction.NOTHING else None
        gradients = tuple(
            Gradient(self.number[item], self.nbytes(item), returned)
            for item in inputs
            if self.emitter.meta[item].requires_grad and self.emitter.meta[node].requires_grad
        )
        saves: set[int] = set()
        own = 0
        double = self.doubles.get(node)
        if double is not None:  # it saves what the local operator saves, and the strips of neighbours
            saved = footprint(double.call, self.kind).saved
            saves = {self.number[double.operands[place]] for place in saved.operands}
            own, self.strips = saved.extra_bytes + self.strips, 0
        scratch = facts_of(node.target).scratch
        ahead, back = scratch(self.emitter.described(node.args)) if scratch else (0, 0)
        return CallMemory(
            takes,
            gives,
            frozenset(saves),
            own,
            gradients,
            repeats=passed is not None,
            forward_scratch=ahead,
            backward_scratch=back,
        )

    def given(self, nodes: Sequence[fx.Node], aliases: Sequence[int | None] = ()) -> tuple[CallResult, ...]:
        found = []
        for place, node in enumerate(nodes):
            self.number[node] = len(self.number)
            alias = aliases[place] if place < len(aliases) else None
            found.append(CallResult(self.number[node], 0 if alias is not None else self.nbytes(node), alias))
        return tuple(found)

    def nbytes(self, node: fx.Node) -> int:
        value = self.emitter.meta[node]
        return value.numel() * value.element_size() if value is not None else 0  # a result that is left out


def _is_part(node: fx.Node) -> bool:
    """Whether the node takes one result of a call with several."""
    return node.target is operator.getitem
