"""Rows that each choose a matrix, as in mixtures of experts: multiplied where they lie, not sorted by choice.

    order = keys.argsort(); ends = keys.histc().cumsum(0)             rows of all samples, by their keys
    y = grouped_mm(x[order // 2], w, ends) + b[keys[order]]           of sorted keys
    z = act(y) * s[order]                                             z in this order
    z[order.argsort()], or index_add(zeros, 0, order // 2, z)         each back where it came from

becomes

    y = routed_mm(x.repeat_interleave(2, 0), w, keys) + b[keys]; z = act(y) * s     each row at its own place

which ranks can share by their rows: what a row becomes depends on no other. The operator sorts its own rows.
Where anything else sees rows in their order, they stay in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Graph, Operator, Ref
from autopar.core.operator_facts import facts_of
from autopar.sharding.rowwise import rowwise
from autopar.sharding.rule import Instance
from autopar.sharding.sorted_rows import EMPTY, Order, SortedRows, SortingRelation
from autopar.trace.forms.grouped_products import GROUPED_MM
from autopar.trace.forms.simplify import without_dead_code, without_identities
from autopar.trace.forms.sparse_products import NAMESPACE
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")


def _routed_mm(rows: Tensor, matrices: Tensor, keys: Tensor) -> Tensor:
    sorted_keys, order = keys.sort(stable=True)
    groups = torch.arange(len(matrices), device=keys.device, dtype=keys.dtype)
    ends = torch.searchsorted(sorted_keys, groups, right=True, out_int32=True)
    products: Tensor = GROUPED_MM(rows.index_select(0, order), matrices, ends)
    return torch.zeros_like(products).index_copy(0, order, products)


_library.define("routed_mm(Tensor rows, Tensor matrices, Tensor keys) -> Tensor")
_library.impl("routed_mm", _routed_mm, "CompositeImplicitAutograd")
ROUTED_MM: Any = torch.ops.autopar_graphs.routed_mm.default


def with_routed_products(graph: Graph) -> Graph:
    """The graph with rows at their own places where they were sorted only to be multiplied in groups."""
    if all(facts_of(item.target).group_ends is None for item in graph.operators):
        return graph
    return _Unsorting(graph).run()


class _Unsorting:
    """Takes the sorts of one graph away that nobody else sees."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.known = graph, SortedRows(graph)
        self.specs, self.editor = graph.specs, GraphEditor(graph)
        self.marks: dict[str, SortingRelation] = {}
        self.keys: dict[str, Ref] = {}  # by the operator that sorts them
        self.kept: set[str] = set()  # sorts whose order somebody else sees
        self.grouped: set[str] = set()
        self.back: set[str] = set()  # operators that bring rows back

    def run(self) -> Graph:
        for item in self.graph.operators:
            self.mark(item)
        seen = {*self.graph.outputs, *(value for _, value in self.graph.writes)}
        self.kept |= {mark.by for name in seen if (mark := self.marks.get(name))}
        self.grouped -= self.kept
        if not self.grouped:
            return self.graph
        for item in self.graph.operators:
            self.editor.start(item)
            self.unsort()
        return without_dead_code(without_identities(self.editor.finish()))

    # -- which rows are sorted, and who sees them -----------------------------------------------------

    def mark(self, item: Operator) -> None:
        """Tell what the results of an operator are to sorted rows; the order of others is seen."""
        given = [self.marks.get(name) for name in item.operands]
        if not any(given):
            self.marks_of_sort(item)
        elif item.target in EMPTY:
            self.give(item, SortingRelation(Order.NOTHING, next(mark.by for mark in given if mark)))
        elif mark := self.known.fetched(item, given) or self.known.picked(item, given):
            self.give(item, mark)
        elif self.known.put_back(item, self.into_nothing(given)) and self.returns(item):
            self.back.add(item.name)
        elif (mark := self.known.in_groups(item, given)) and self.has_own_dtype(item):
            self.grouped.add(mark.by)
            self.give(item, mark)
        elif mark := self.row_by_row(item, given):
            self.give(item, mark)
        elif mark := self.known.numbers(item, self.into_nothing(given)):
            self.give(item, mark, last_only=mark.order is Order.PLACES)
        else:
            self.kept |= {mark.by for mark in given if mark and mark.order is Order.ROWS}

    def marks_of_sort(self, item: Operator) -> None:
        """Note the results of a sort of whole numbers, or a count of those that are sorted."""
        if item.operands and (counts := self.known.counted(item)):
            self.give(item, counts)
            return
        marks = self.known.sorting(item) if item.operands else None
        if marks is None or self.specs[item.operands[0]].dtype.is_floating_point:
            return
        self.keys[item.name] = Ref(item.operands[0])
        self.marks |= {name: mark for name, mark in zip(item.results, marks, strict=True) if name and mark}

    def give(self, item: Operator, mark: SortingRelation, *, last_only: bool = False) -> None:
        names = item.results[-1:] if last_only else item.results
        self.marks |= {name: mark for name in names if name}

    def into_nothing(self, given: Sequence[SortingRelation | None]) -> list[SortingRelation | None]:
        """Marks without those of tensors that are only as long as the rows."""
        return [None if mark and mark.order is Order.NOTHING else mark for mark in given]

    def returns(self, item: Operator) -> bool:
        """Whether an operator brings rows back one to one, or adds them up."""
        if item.target is aten.index_add.default:
            return not item.kwargs.get("alpha")
        return item.target is not aten.index_put.default or len(item.args) < 4 and not item.kwargs

    def has_own_dtype(self, item: Operator) -> bool:
        """Whether products keep the rows' dtype."""
        return Instance(item, self.specs).arguments.get("out_dtype") is None

    def row_by_row(self, item: Operator, given: Sequence[SortingRelation | None]) -> SortingRelation | None:
        """Relation after an operator on single rows of one order; its other operands are equal for all
        rows."""
        sorts = {mark.by for mark in given if mark}
        if len(sorts) > 1 or any(mark.order is not Order.ROWS for mark in given if mark):
            return None
        marked = {name for name, mark in zip(item.operands, given, strict=True) if mark}
        return SortingRelation(Order.ROWS, sorts.pop()) if marked == set(rowwise(item, self.specs)) else None

    # -- the graph without them -----------------------------------------------------------------------

    def unsort(self) -> None:
        """Write the operator for rows at their own places where they were sorted."""
        item = self.editor.item
        given = [self.marks.get(name) for name in item.operands]
        sorts = {mark.by for mark in given if mark and mark.order is Order.ROWS} & self.grouped
        mark = next((self.marks[name] for name in item.results if name in self.marks), None)
        if item.name in self.back:
            self.bring_back() if sorts else self.editor.keep()
        elif mark is None or mark.order is not Order.ROWS or mark.by not in self.grouped:
            self.editor.keep()
        elif facts_of(item.target).group_ends is not None:
            rows, matrices = item.args[:2]
            self.editor.keep(target=ROUTED_MM, args=(rows, matrices, self.keys[mark.by]), kwargs={})
        elif sorts:
            self.editor.keep()
        elif self.known.picked(item, given):
            self.editor.keep(args=(item.args[0], [self.keys[mark.by]]))
        elif (per := self.marks[item.operands[1]].per) > 1:  # here they were sorted
            args = item.args[0], per, 0
            self.editor.keep(target=aten.repeat_interleave.self_int, args=args, kwargs={})
        else:
            self.give_as_it_is(item.args[0])

    def give_as_it_is(self, rows: Ref) -> None:
        self.editor.keep(target=aten.alias.default, args=(rows,), kwargs={})

    def bring_back(self) -> None:
        """Rows that are where they came from already, the `per` of one added up."""
        editor, item = self.editor, self.editor.item
        if item.target is not aten.index_add.default:
            self.give_as_it_is(item.args[2 if item.target is aten.index_put.default else 0])
            return
        rows, per = item.args[3], self.marks[item.operands[1]].per
        if per > 1:
            spec = editor.specs[rows.name]
            count, *others = spec.shape
            shape = [count // per, per, *others]
            parts = editor.emit(aten.view.default, rows, shape, spec=replace(spec, shape=tuple(shape)))
            summed = replace(spec, shape=(count // per, *others))
            rows = Ref(editor.emit(aten.sum.dim_IntList, Ref(parts), [1], spec=summed))
        editor.keep(target=aten.add.Tensor, args=(item.args[0], rows), kwargs={})
