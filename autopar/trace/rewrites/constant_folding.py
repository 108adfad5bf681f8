"""What follows from constants alone is folded into constants, which pick and place rows by operators.

    ones(E), dst -> scatter_add -> pow -> norm              one constant
    scatter_add(zeros, 0, dst.view(-1, 1).expand(E, F), x)  place(x, dst, N, "sum")
    x[src]                                                  pick(x, src)

Only where integer constants pick or place rows: of other models nothing changes. What is made of numbers,
and what is larger than its memory (`expand`), stays an operator.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from autopar.core.graph import Graph, GraphInput, InputKind, Operator, Ref, TensorSpec, map_refs, may_learn
from autopar.core.operator_facts import facts_of
from autopar.trace.forms.simplify import without_dead_code
from autopar.trace.forms.sparse_products import PRODUCT
from autopar.trace.rewrites.constants import RAISED, Constants, held_value
from autopar.trace.rewrites.placed_rows import RowWriter
from autopar.trace.rewrites.row_placements import RowPick, RowPlacement, RowReader
from autopar.trace.rewrites.sorted_edges import with_sorted_edges
from autopar.trace.values.structure import digest_of
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten


def folded(graph: Graph) -> Graph:
    """The graph with what follows from its constants as constants, if they pick or place rows."""
    if not _has_structure(graph):
        return graph
    return _without_twins(with_sorted_edges(_without_twins(_Folding(graph).run())))


def _has_structure(graph: Graph) -> bool:
    held = any(held_value(item) is not None and not may_learn(item.spec.dtype) for item in graph.inputs)
    return held and any(facts_of(item.target).indexed for item in graph.operators)


class _Folding:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.editor, self.constants = graph, GraphEditor(graph), Constants(graph)
        self.reader = RowReader(graph.specs, self.constants)

    def run(self) -> Graph:
        kept = [(item, self.read(item)) for item in self.graph.operators if not self.folds(item)]
        picks = {str(item.results[0]): rows for item, rows in kept if isinstance(rows, RowPick)}
        adds = any(isinstance(rows, RowPlacement) or item.target is PRODUCT for item, rows in kept)
        writer = RowWriter(self.editor, self.constants, picks if adds else {})
        for item, rows in kept:
            self.editor.start(item)
            match rows:
                case RowPlacement():
                    writer.place(rows)
                case RowPick() if adds:
                    writer.pick(rows)
                case RowPick():
                    args = Ref(rows.source), rows.dim, Ref(writer.index(rows))
                    self.editor.keep(target=aten.index_select.default, args=args, kwargs={})
                case _:
                    self.write(item)
        return self.with_constants(self.editor.finish())

    def folds(self, item: Operator) -> bool:
        """Whether nothing is left of an operator but constants: a view larger than its memory stays."""
        if not self.constants.folds(item):
            return False
        self.constants.add(item)
        values = (self.constants.value(name) for name in item.results if name)
        return not any(value.dim() > 1 and value.numel() > _elements(value) for value in values)

    def read(self, item: Operator) -> RowPick | RowPlacement | None:
        """The rows that an operator picks or places by a constant, if it does."""
        if item.target is PRODUCT:
            self.check_entries(item)
        return self.reader.picked(item) or self.reader.placed(item)

    def write(self, item: Operator) -> None:
        """Write another operator as it is, but for rows that get one number, and those of a scatter."""
        if item.target is aten.index_fill.int_Scalar:
            self.fill(item)
        elif item.target is aten.scatter_reduce.two and item.args[4] != "sum":
            self.reduce_rows(item)
        else:
            self.editor.keep()

    def fill(self, item: Operator) -> None:
        """Write rows that get one number as a mask."""
        itself, dim, index, value = item.args
        shape = self.graph.specs[itself.name].shape
        if index.name not in self.constants or not shape:
            return self.editor.keep()
        mask = torch.zeros(shape[dim % len(shape)], dtype=torch.bool)
        mask[self.constants.value(index.name)] = True
        mask = mask.view(-1, *[1] * (len(shape) - dim % len(shape) - 1))
        args = itself, Ref(self.editor.constant(f"{item.name}_mask", mask)), value
        return self.editor.keep(target=aten.masked_fill.Scalar, args=args)

    def reduce_rows(self, item: Operator) -> None:
        """Write a scatter by an index for each row, if it names whole rows."""
        includes = bool(item.kwargs.get("include_self", True))
        rows = self.reader.scattered(item, str(item.args[4]), includes=includes)
        if rows is None:
            return self.editor.keep()
        index = Ref(self.editor.constant(f"{item.name}_rows", rows.index))
        args = item.args[0], rows.dim, index, Ref(rows.source), rows.reduce
        kwargs = {"include_self": includes}
        return self.editor.keep(target=aten.index_reduce.default, args=args, kwargs=kwargs)

    def check_entries(self, item: Operator) -> None:
        """Raise TraceError for a sparse matrix with rows or columns that aren't there."""
        lengths = int(item.args[4]), self.graph.specs[item.args[3].name].shape[0]
        for index, length in zip(item.args[:2], lengths, strict=True):
            self.reader.check(item, self.constants.value(index.name), length)

    def with_constants(self, graph: Graph) -> Graph:
        """The graph with a constant for each folded tensor that it still uses."""
        given = {item.name for item in graph.inputs}
        used = {name for item in graph.operators for name in item.operands} | {*graph.outputs}
        used |= {value for _, value in graph.writes}
        names = sorted(name for name in used - given - graph.makers().keys() if name in self.constants)
        made = tuple(map(self.constant, names))
        specs = graph.specs | {item.name: item.spec for item in made}
        return replace(graph, inputs=(*graph.inputs, *made), specs=specs)

    def constant(self, name: str) -> GraphInput:
        spec, value = replace(self.graph.specs[name], requires_grad=False), self.constants.value(name)
        exact = self.constants.exact_value(name) if value.dtype in RAISED else None
        return GraphInput(
            name, InputKind.CONSTANT, f"folded.{name}", spec, value=value.contiguous(), exact=exact
        )


def _without_twins(graph: Graph) -> Graph:
    """The graph with one constant for all that are equal."""
    first: dict[tuple[TensorSpec, str], str] = {}
    same: dict[str, str] = {}
    for item in graph.inputs:
        if (value := held_value(item)) is not None:
            same[item.name] = first.setdefault((item.spec, digest_of(value)), item.name)

    def told(ref: Ref) -> Ref:
        return Ref(same.get(ref.name, ref.name))

    operators = tuple(
        replace(item, args=map_refs(item.args, told), kwargs=map_refs(item.kwargs, told))
        for item in graph.operators
    )
    outputs = tuple(same.get(name, name) for name in graph.outputs)
    writes = tuple((buffer, same.get(name, name)) for buffer, name in graph.writes)
    return without_dead_code(replace(graph, operators=operators, outputs=outputs, writes=writes))


def _elements(value: Tensor) -> int:
    """How many elements a view looks at."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return max(1, math.prod(size for size, stride in pairs if stride))
