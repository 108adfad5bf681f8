"""A last product and its loss as one operator, which makes the logits piece by piece (forms/linear_loss.py).

    linear(x, w, b) [..., S, V] -> float -> [..., :-1, :] -> view [N, V] -> cross_entropy(_, labels)

becomes

    x [..., S, I] -> [..., :-1, :] -> reshape [N, I] -> linear_cross_entropy(_, labels, w, b)

where nobody else reads the logits, what lies between only takes, casts or renames rows, and the loss is a
mean or a sum over labels, without weights of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.core.graph import Graph, Operator, Ref, TensorSpec, may_learn
from autopar.core.operator_facts import facts_of
from autopar.sharding.rule import Instance
from autopar.trace.forms.linear_loss import LINEAR_LOSS, MEAN, SUM, wide
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten
_LOSS, _PRODUCT = aten.cross_entropy_loss.default, aten.linear.default
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default)


@dataclass(frozen=True, slots=True)
class _Chain:
    """A product, what happens to rows of what it gives, in order, and the loss of these."""

    product: Operator
    between: tuple[Operator, ...]
    loss: Operator


def with_losses_in_pieces(graph: Graph) -> Graph:
    """The graph with its last products and their losses in pieces; itself if there is none."""
    if all(item.target is not _LOSS for item in graph.operators):
        return graph
    makers, uses = graph.makers(), graph.consumers()
    leaving = {*graph.outputs, *(value for _, value in graph.writes)}

    def maker(name: str) -> Operator | None:
        """The operator that gives a tensor that nobody else reads."""
        return makers.get(name) if len(uses[name]) == 1 and name not in leaving else None

    found = (_chain(item, graph, maker) for item in graph.operators if item.target is _LOSS)
    chains = {chain.loss.name: chain for chain in found if chain}
    return _written(graph, chains) if chains else graph


def _chain(loss: Operator, graph: Graph, maker: Callable[[str], Operator | None]) -> _Chain | None:
    """The product whose rows a loss is of, if it is one that may be in pieces."""
    given, between = Instance(loss, graph.specs), list[Operator]()
    if given.has("weight") or given["reduction"] not in (MEAN, SUM) or may_learn(given.spec(1).dtype):
        return None
    if len(given.shape()) != 2:
        return None
    item = maker(loss.operands[0])
    while item is not None and item.checkpoint == loss.checkpoint:
        if item.target is _PRODUCT:
            return _Chain(item, tuple(between), loss) if _fits(item, loss, graph) else None
        if not _keeps_rows(item, graph):
            return None
        between.insert(0, item)
        item = maker(item.operands[0])
    return None


def _fits(product: Operator, loss: Operator, graph: Graph) -> bool:
    """Whether the product has a matrix, and the loss no more bits than one in pieces has."""
    rows, matrix = (graph.specs[name] for name in product.operands[:2])
    result = graph.specs[str(loss.results[0])]
    return len(matrix.shape) == 2 and result.dtype.itemsize <= wide(rows.dtype).itemsize


def _keeps_rows(item: Operator, graph: Graph) -> bool:
    """Whether what an operator gives are rows of what it takes, in no fewer bits, and in their order."""
    before, after = (graph.specs[str(name)] for name in (item.operands[0], item.results[0]))
    if len(item.operands) != 1 or before.shape[-1:] != after.shape[-1:]:
        return False
    if facts_of(item.target).is_cast or item.target in _COPIES:
        return may_learn(after.dtype) and after.dtype.itemsize >= before.dtype.itemsize
    if item.target is aten.slice.Tensor:
        return bool(Instance(item, graph.specs)["dim"] % len(before.shape) < len(before.shape) - 1)
    return item.target in _VIEWS and bool(before.shape)


def _written(graph: Graph, chains: dict[str, _Chain]) -> Graph:
    editor = GraphEditor(graph)
    for item in graph.operators:
        editor.start(item)
        if (chain := chains.get(item.name)) is None:
            editor.keep()
        else:
            _write(editor, chain)
    return editor.finish()


def _write(editor: GraphEditor, chain: _Chain) -> None:
    """Take rows of the product's operand as they were taken of what it gave, and write the loss of these."""
    product, loss = chain.product, Instance(chain.loss, editor.graph.specs)
    rows, matrix, *bias = (Ref(name) for name in product.operands)
    for item in chain.between:
        rows = _taken(editor, item, rows)
    labels = loss.arguments["target"]
    how = loss["reduction"], loss["ignore_index"], loss["label_smoothing"]
    args: tuple[Any, ...] = rows, labels, matrix, bias[0] if bias else None, *how
    given, result = editor.specs[rows.name], editor.specs[editor.result]
    if result.dtype is wide(given.dtype):
        editor.keep(target=LINEAR_LOSS, args=args, kwargs={}, module=product.module)
        return
    spec = replace(result, dtype=wide(given.dtype))
    total = editor.emit(LINEAR_LOSS, *args, spec=spec)
    editor.keep(target=aten.to.dtype, args=(Ref(total), result.dtype), kwargs={})


def _taken(editor: GraphEditor, item: Operator, rows: Ref) -> Ref:
    """The rows that an operator on logits takes, of the product's operand."""
    given = editor.specs[rows.name]
    shape = (*editor.graph.specs[str(item.results[0])].shape[:-1], given.shape[-1])
    spec = TensorSpec(shape, given.dtype, given.requires_grad)
    if item.target is aten.slice.Tensor:
        return Ref(editor.emit(item.target, rows, *item.args[1:], spec=spec, **item.kwargs))
    if item.target in _VIEWS and shape != given.shape:
        return Ref(editor.emit(aten.reshape.default, rows, list(shape), spec=spec))
    return rows
