"""Edges in the order of their destinations, whatever order they were passed in.

    index    2 0 1 0     order  1 3 2 0     messages of a vertex lie side by side,
    sorted   0 0 1 2                        so that a cut of vertices is a cut of edges, too

A tensor has a row for each edge where it is picked by a constant, or made row by row of such tensors: row k
of the result follows from rows k alone. All that are tied so, up to where rows are placed, are put in order
together: constants that pick and place are, what comes in by edge (features, weights that require gradients)
is picked in that order, what leaves or meets another operator is put back. Random masks are drawn in the old
order, and batch norms take rows in any.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from autopar.core.graph import Graph, Operator, Ref, map_refs
from autopar.sharding.rowwise import rowwise
from autopar.trace.rewrites.edge_operators import PICK, PLACE
from autopar.trace.values.structure import digest_of
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten
_DROPOUT = aten.dropout.default


def with_sorted_edges(graph: Graph) -> Graph:
    """The graph with its edges in the order of where they lead."""
    if all(item.target is not PLACE for item in graph.operators):
        return graph
    return _Sorting(graph).run()


class _Sorting:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.editor, self.specs = graph, GraphEditor(graph), graph.specs
        self.inputs = {item.name: item for item in graph.inputs}
        self.ties = nx.utils.UnionFind(self.specs)
        for item in graph.operators:
            self.ties.union(*self.rows_of(item), *(name for name in item.results[:1] if name))
        self.votes = self.count_votes()
        self.orders: dict[str, Tensor | None] = {}  # by one of the tensors that are tied
        for tied in self.votes:
            self.find_order(tied)
        self.moved: dict[tuple[str, str], str] = {}  # tensor, order -> the tensor in it

    def rows_of(self, item: Operator) -> tuple[str, ...]:
        """The operands whose rows an operator goes through one by one, but for drawing a mask."""
        return item.operands if item.target is _DROPOUT else rowwise(item, self.graph.specs)

    def count_votes(self) -> dict[str, dict[tuple[str, str], int]]:
        """For tensors that are tied, how many elements of theirs each index places in each tensor."""
        votes: dict[str, dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
        for item in self.graph.operators:
            if item.target is PLACE:
                (rows, index), result = item.operands, item.results[0]
                assert result is not None
                votes[self.ties[rows]][index, result] += self.specs[rows].numel
        return votes

    def find_order(self, tied: str) -> Tensor | None:
        """The order that sorts most of what is placed, once that of its target is known."""
        if tied in self.orders or tied not in self.votes:
            return self.orders.get(tied)
        self.orders[tied] = None  # while it is sought
        counts = self.votes[tied]
        index, result = max(counts, key=lambda key: (counts[key], key))
        places = self.ordered_places(index, self.find_order(self.ties[result]))
        order = torch.argsort(places, stable=True)
        self.orders[tied] = None if torch.equal(order, torch.arange(len(order))) else order
        return self.orders[tied]

    def ordered_places(self, index: str, order: Tensor | None) -> Tensor:
        """Places of rows in a tensor that is put in another order."""
        places = self.value(index)
        return places if order is None else torch.argsort(order)[places]

    def value(self, name: str) -> Tensor:
        value = self.inputs[name].value
        assert value is not None, "rows are picked and placed by constants"
        return value

    def order_of(self, name: str | None) -> Tensor | None:
        """The order in which a tensor's rows are put, if they are."""
        return None if name is None else self.orders.get(self.ties[name])

    def run(self) -> Graph:
        if all(order is None for order in self.orders.values()):
            return self.graph
        for item in self.graph.operators:
            self.editor.start(item)
            self.write(item)
        outputs = tuple(map(self.as_before, self.graph.outputs))
        writes = tuple((buffer, self.as_before(name)) for buffer, name in self.graph.writes)
        return self.editor.finish(outputs=outputs, writes=writes)

    def write(self, item: Operator) -> None:
        """Write the operator on rows in order where it goes through them one by one, else as it was."""
        order, keep = self.order_of(item.results[0]), self.editor.keep
        if item.target is PLACE:
            rows, index, *rest = item.args
            places, before = self.ordered_places(index.name, order), self.order_of(rows.name)
            places = places if before is None else places[before]
            keep(args=(Ref(self.in_order(rows.name)), Ref(self.index(places, index.name)), *rest))
        elif item.target is PICK:
            x, index = item.args
            places = self.value(index.name)
            if x.name not in self.inputs and (before := self.order_of(x.name)) is not None:
                places = torch.argsort(before)[places]
            places = places if order is None else places[order]
            keep(args=(x, Ref(self.index(places, index.name))))
        elif not any(self.order_of(name) is not None for name in item.results):
            keep(**self.operands(frozenset()))
        elif item.target is _DROPOUT and order is not None:
            self.drop(item, order)
        elif rows_of := self.rows_of(item):
            keep(**self.operands(frozenset(rows_of)))
        else:
            self.reorder(item)

    def operands(self, by_row: frozenset[str]) -> dict[str, Any]:
        """The operator's arguments, those in order that it goes through `by_row`, the others as they were."""

        def told(ref: Ref) -> Ref:
            return Ref(self.in_order(ref.name) if ref.name in by_row else self.as_before(ref.name))

        item = self.editor.item
        return {"args": map_refs(item.args, told), "kwargs": map_refs(item.kwargs, told)}

    def reorder(self, item: Operator) -> None:
        """The operator as it was, and then those of its results in order that others take so."""
        ordered = [name for name in item.results if name and self.order_of(name) is not None]
        before = {name: self.editor.title(f"{name}_unsorted") for name in ordered}
        self.editor.specs |= {other: self.specs[name] for name, other in before.items()}
        results = tuple(before.get(name, name) if name else None for name in item.results)
        self.editor.keep(**self.operands(frozenset()), name=before.get(item.name, item.name), results=results)
        for name, other in before.items():
            args = Ref(other), Ref(self.index(self.order_of(name), "edge_order"))
            self.editor.keep(name=name, target=PICK, args=args, kwargs={}, results=(name,), order=())

    def drop(self, item: Operator, order: Tensor) -> None:
        """A dropout of rows in order, by the mask that the old order draws."""
        emit, (x, *rest) = self.editor.emit, item.args
        spec = replace(self.specs[self.editor.result], requires_grad=False)
        device = torch.device("cpu")
        ones = emit(aten.ones.default, [*spec.shape], spec=spec, dtype=spec.dtype, device=device)
        drawn = emit(_DROPOUT, Ref(ones), *rest, spec=spec)
        mask = emit(PICK, Ref(drawn), Ref(self.index(order, "edge_order")), spec=spec)
        args = Ref(self.in_order(x.name)), Ref(mask)
        self.editor.keep(target=aten.mul.Tensor, args=args, kwargs={}, order=())

    def in_order(self, name: str) -> str:
        """The name of a tensor with its rows in order: what operators make is so, inputs are picked."""
        order = self.order_of(name)
        if order is None or name not in self.inputs:
            return name
        if self.inputs[name].value is not None:
            return self.constant(name, order)
        return self.pick(name, order, "sorted")

    def as_before(self, name: str) -> str:
        """The name of a tensor with its rows as the user has them."""
        order = self.order_of(name)
        if order is None or name in self.inputs:
            return name
        return self.pick(name, torch.argsort(order), "unsorted")

    def pick(self, name: str, order: Tensor, word: str) -> str:
        """The name of a tensor with its rows in an order, picked once."""
        if (name, word) not in self.moved:
            args = Ref(name), Ref(self.index(order, "edge_order"))
            picked = self.editor.emit(PICK, *args, spec=self.specs[name], word=word)
            self.moved[name, word] = picked
        return self.moved[name, word]

    def constant(self, name: str, order: Tensor) -> str:
        """A constant with its rows in an order."""
        exact = self.inputs[name].exact
        return self.add(self.value(name)[order], name, None if exact is None else exact[order])

    def index(self, places: Tensor | None, name: str) -> str:
        """A constant of places, `name` itself if that is what it says."""
        assert places is not None
        known = self.inputs.get(name)
        same = known is not None and known.value is not None and torch.equal(known.value, places)
        return name if same else self.add(places, name)

    def add(self, value: Tensor, name: str, exact: Tensor | None = None) -> str:
        title = f"{name}_{digest_of(value)[:12]}"
        return title if title in self.editor.inputs else self.editor.constant(title, value, exact)
