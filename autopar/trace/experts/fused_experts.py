"""Chains of routed products of one router as one operator, whose rows may travel to their experts.

    y = routed_mm(x, w1, keys); z = silu(y[:, :h]) * y[:, h:]; routed_mm(z, w2, keys)      product by product

becomes

    routed_experts([x], [w1, w2], keys, body)                                              rows travel once

A chain is all operators between its products (and vectors that keys pick, as biases), where each gives row t
of row t alone, in words that a body has, and nobody else sees what lies between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch

from autopar.core.graph import Graph, Operator, Ref, refs
from autopar.core.operator_facts import facts_of
from autopar.sharding.rowwise import rowwise
from autopar.sharding.rule import Instance
from autopar.trace.experts.body import (
    CALL,
    EVERY,
    PART,
    PICK,
    PRODUCT,
    BodyDtype,
    BodyStep,
    BodyValue,
    write_body,
)
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.rewrites.routed_products import ROUTED_MM
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten
_SPLITS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)
_PICKS = {aten.index_select.default: 2, aten.embedding.default: 1}  # the argument with the keys


def with_routed_experts(graph: Graph) -> Graph:
    """The graph with each chain of routed products as one operator."""
    if all(item.target is not ROUTED_MM for item in graph.operators):
        return graph
    chains = {chain.operators[-1].name: chain for chain in _Chains(graph).find()}
    inside = {item.name for chain in chains.values() for item in chain.operators}
    editor = GraphEditor(graph)
    for item in graph.operators:
        editor.start(item)
        if item.name in chains:
            chain = chains[item.name]
            args = chain.rows, chain.weights, Ref(chain.keys), chain.body, chain.dtypes
            editor.keep(target=ROUTED_EXPERTS, args=args, kwargs={}, order=())
        elif item.name not in inside:
            editor.keep()
    return editor.finish()


@dataclass(frozen=True, slots=True)
class ExpertChain:
    """Operators, in order, that are one body; the last one gives what leaves them."""

    operators: Sequence[Operator]
    rows: list[Ref]
    weights: list[Ref]
    keys: str
    body: str
    dtypes: list[torch.dtype]


class _Chains:
    """Finds the chains of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.specs = graph, graph.specs
        self.makers, self.consumers = graph.makers(), graph.consumers()
        self.place = {item.name: place for place, item in enumerate(graph.operators)}
        self.seen = {*graph.outputs, *(value for _, value in graph.writes)}

    def find(self) -> Iterator[ExpertChain]:
        routers = dict.fromkeys(_keys(item) for item in self.graph.operators if item.target is ROUTED_MM)
        for keys in routers:
            for operators in self.runs(keys):
                chain = self.chain(keys, operators)
                if chain is not None:
                    yield chain

    def runs(self, keys: str) -> Iterator[list[Operator]]:
        """Operators between products of one router, in runs that share values."""
        below = self.below(keys)
        ends = {
            name
            for name, item in below.items()
            if item.target is ROUTED_MM or any(self.picks(self.makers.get(x), keys) for x in item.operands)
        }
        between = self.above(ends, below)
        alike: Any = nx.utils.UnionFind(between)
        for item in between.values():
            for name in item.operands:
                maker = self.makers.get(name)
                if maker is not None and maker.name in between:
                    alike.union(item.name, maker.name)
        for names in alike.to_sets():
            picks = {
                maker.name: maker
                for name in names
                for each in between[name].operands
                if self.picks(maker := self.makers.get(each), keys) and maker
            }
            yield sorted((*(between[name] for name in names), *picks.values()), key=self.order)

    def order(self, item: Operator) -> int:
        return self.place[item.name]

    def below(self, keys: str) -> dict[str, Operator]:
        """Products of a router, and what is made of them row by row."""
        found: dict[str, Operator] = {}
        for item in self.graph.operators:
            if item.target is ROUTED_MM:
                fits = _keys(item) == keys
            else:
                makers = [self.makers.get(name) for name in item.operands]
                fits = any(maker and maker.name in found for maker in makers) and self.is_known(item)
            if fits:
                found[item.name] = item
        return found

    def above(self, ends: set[str], below: Mapping[str, Operator]) -> dict[str, Operator]:
        """Operators of `below` from which some of `ends` follow, with these."""
        found: dict[str, Operator] = {}
        for item in reversed(list(below.values())):
            users = [user.name for name in item.results if name for user, _ in self.consumers[name]]
            if item.name in ends or any(name in found for name in users):
                found[item.name] = item
        return found

    def is_known(self, item: Operator) -> bool:
        """Whether a body has words for an operator."""
        if len(item.results) != 1 and item.target not in _SPLITS or None in item.results:
            return False
        if any(len(self.specs[name].shape) != 2 for name in (*item.operands, *item.results) if name):
            return False
        if self.columns(item) is not None:
            return True
        rows = set(rowwise(item, self.specs))
        return facts_of(item.target).elementwise and rows == set(item.operands)

    def columns(self, item: Operator) -> list[tuple[str, int, int]] | None:
        """The kind, place and count of each result that is equal columns of operand 0; else None."""
        op = Instance(item, self.specs)
        if item.target in _SPLITS and op.dim(op["dim"]) == 1:
            widths = {self.specs[name].shape[1] for name in item.results if name}
            count = len(item.results)
            return [(PART, place, count) for place in range(count)] if len(widths) == 1 else None
        if item.target is aten.slice.Tensor and op.dim(op["dim"]) == 1:
            return _sliced(op)
        return None

    def picks(self, item: Operator | None, keys: str) -> bool:
        """Whether an operator gives each row the vector of its expert."""
        if item is None or not item.operands or len(self.specs[item.operands[0]].shape) != 2:
            return False
        if item.target is aten.index.Tensor:
            return list(item.args[1]) == [Ref(keys)]
        place = _PICKS.get(item.target)
        plain = item.target is not aten.index_select.default or item.args[1] == 0
        return place is not None and plain and item.args[place] == Ref(keys)

    def chain(self, keys: str, operators: Sequence[Operator]) -> ExpertChain | None:
        """The chain of operators; None where something else sees what lies between, or no text holds it."""
        *_, last = operators
        names = {item.name for item in operators}
        leaving = {
            name
            for item in operators
            for name in item.results
            if name and (name in self.seen or any(user.name not in names for user, _ in self.consumers[name]))
        }
        regions = {item.checkpoint for item in operators}
        if len(last.results) != 1 or leaving != {last.results[0]} or len(regions) > 1:
            return None
        return _Writer(self, keys, operators).written()


def _keys(item: Operator) -> str:
    keys: Ref = item.args[2]
    return keys.name


def _sliced(op: Instance) -> list[tuple[str, int, int]] | None:
    """A slice of columns as one of equal runs, or as every n-th column; None for any other."""
    width, made, step = op.shape()[1], op.result_shape()[1], int(op["step"])
    start = int(op["start"] or 0)
    start += width if start < 0 else 0
    if not made or width % made:
        return None
    count = width // made
    if step == 1 and start % made == 0:
        return [(PART, start // made, count)]
    return [(EVERY, start, count)] if step == count and start < count else None


@dataclass(slots=True)
class _Writer:
    """Writes the body of a chain."""

    chains: _Chains
    keys: str
    operators: Sequence[Operator]
    rows: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    steps: list[BodyStep] = field(default_factory=list)
    dtypes: dict[torch.dtype, int] = field(default_factory=dict)

    def written(self) -> ExpertChain | None:
        self.find_operands()
        first = len(self.rows) + len(self.weights)
        for item in self.operators:
            for name, step in zip(item.results, self.steps_of(item), strict=True):
                assert name is not None
                self.made[name] = first + len(self.steps)
                self.steps.append(step)
        body = write_body(self.steps)
        if body is None or not self.rows:
            return None
        rows, weights = [Ref(name) for name in self.rows], [Ref(name) for name in self.weights]
        return ExpertChain(self.operators, rows, weights, self.keys, body, list(self.dtypes))

    def find_operands(self) -> None:
        """Number the tensors that come from outside: those by rows, then those by experts."""
        made = {name for item in self.operators for name in item.results}
        for item in self.operators:
            for place, name in enumerate(item.operands):
                by_expert = place == (0 if self.is_pick(item) else 1) and self.takes_weight(item)
                if by_expert:
                    self.weights.setdefault(name, len(self.weights))
                elif name not in made and name != self.keys:
                    self.rows.setdefault(name, len(self.rows))

    def is_pick(self, item: Operator) -> bool:
        return self.chains.picks(item, self.keys)

    def takes_weight(self, item: Operator) -> bool:
        return item.target is ROUTED_MM or self.is_pick(item)

    def number(self, name: str) -> int:
        if name in self.made:
            return self.made[name]
        return self.rows[name] if name in self.rows else len(self.rows) + self.weights[name]

    def steps_of(self, item: Operator) -> list[BodyStep]:
        if item.target is ROUTED_MM:
            x, w = (ref.name for ref in item.args[:2])
            return [BodyStep(PRODUCT, (self.number(x), len(self.rows) + self.weights[w]))]
        if self.is_pick(item):
            return [BodyStep(PICK, (len(self.rows) + self.weights[item.operands[0]],))]
        columns = self.chains.columns(item)
        if columns is not None:
            whole = self.number(item.operands[0])
            return [BodyStep(kind, (whole,), place, count) for kind, place, count in columns]
        values = tuple(self.number(ref.name) for ref in refs((item.args, item.kwargs)))
        args, kwargs = self.plain(item.args), self.plain(item.kwargs)
        return [BodyStep(CALL, values, target=item.target, args=args, kwargs=kwargs)]

    def plain(self, tree: Any) -> Any:
        """Arguments with numbers of values and dtypes in their places."""
        match tree:
            case Ref(name):
                return BodyValue(self.number(name))
            case torch.dtype():
                return BodyDtype(self.dtypes.setdefault(tree, len(self.dtypes)))
            case tuple() | list():
                return type(tree)(map(self.plain, tree))
            case dict():
                return {name: self.plain(item) for name, item in tree.items()}
            case _:
                return tree
