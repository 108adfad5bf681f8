"""Whether the samples of a batch go through a graph independently of each other.

Then micro-batches compute together what the batch computes at once. A batch norm, a softmax over the batch,
an operator without a rule, or anything that has the sample factor but cannot be sharded by it, mixes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autopar.core.graph import Graph, GraphInput, InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import P, Shard
from autopar.core.strategy import Option
from autopar.errors import RuleError
from autopar.sharding.atoms import Atom, Dims
from autopar.sharding.equation import Kind
from autopar.sharding.rule import Instance, rule_of
from autopar.sharding.strategies import find_atoms, options_of


def mixing_operator(graph: Graph, samples: int, *, end: Operator | None) -> Operator | None:
    """The first operator that mixes samples before `end`, which makes one number of them all, or takes a row
    for each from what is no user's input, whose rows stay when fewer samples come; None if there is none.
    User inputs whose dim 0 is `samples` long hold a row for each."""
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    batch = {
        dims.atoms.components[(item.name, 0, 0)]
        for item in graph.inputs
        if item.kind is InputKind.USER and item.spec.shape and item.spec.shape[0] == samples
    }
    fixed = {item.name for item in graph.inputs if item.kind is not InputKind.USER}
    rows = {name for name in fixed if _has(name, dims, batch)}
    for item in graph.operators:
        if not rows.isdisjoint(item.operands):
            return item
        if item is end:
            return None
        if any(_has(name, dims, batch) for name in item.operands) and not _keeps_apart(item, dims, batch):
            return item
    return None


def rows_instead(graph: Graph, cut: Collection[str]) -> tuple[GraphInput, ...]:
    """The user inputs over whose rows the loss runs, where micro-batches take them whole, and other inputs
    that the loss comes from, `cut` by path, in parts. None for a loss over samples.

        input_0 [10] of `cut`, input_1 [4]  ->  embedding_bag [4, d]  ->  cross_entropy with input_2 [4]
    """
    users = [item for item in graph.inputs if item.kind is InputKind.USER and item.spec.shape]
    whole = [item for item in users if item.target not in cut]
    if not whole or graph.loss is None:
        return ()
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    parts = {item.name for item in users if item.target in cut}
    batch = {atom for name in parts for atom in _rows(name, dims)}
    for name in _reduced(graph, parts):
        rows = _rows(name, dims)
        instead = tuple(item for item in whole if _rows(item.name, dims) & rows)
        if instead and not _has(name, dims, batch):
            return instead
    return ()


def _reduced(graph: Graph, cut: Collection[str]) -> Iterator[str]:
    """The tensors that come from the inputs `cut` and of which single numbers are made for the loss."""
    makers = {name: item for item in graph.operators for name in item.results if name}
    fed = set(cut)
    for item in graph.operators:
        if not fed.isdisjoint(item.operands):
            fed.update(name for name in item.results if name)
    ahead = [graph.loss] if graph.loss else []
    for name in ahead:
        for operand in makers[name].operands if name in makers else ():
            if graph.specs[operand].shape:
                if operand in fed:
                    yield operand
            elif operand not in ahead:
                ahead.append(operand)


def _rows(name: str, dims: Dims) -> frozenset[Atom]:
    """What dim 0 runs through."""
    return frozenset(dims.atoms.components[(name, 0, atom)] for atom in range(len(dims.atoms.of[name][0])))


def _has(name: str, dims: Dims, batch: Collection[Atom]) -> bool:
    return any(
        dims.atoms.components[(name, dim, atom)] in batch
        for dim, atoms in enumerate(dims.atoms.of[name])
        for atom in range(len(atoms))
    )


def _keeps_apart(item: Operator, dims: Dims, batch: Collection[Atom]) -> bool:
    """Whether the operator can be sharded by samples, in all that it takes of them, and shards then need
    nothing of each other."""
    rows = {place for place, name in enumerate(item.operands) if _has(name, dims, batch)}
    for option in options_of(item, dims):
        sharded = {
            place
            for place, (name, each) in enumerate(zip(item.operands, option.operands, strict=True))
            if isinstance(each, Shard) and dims.component(name, each) in batch
        }
        if sharded == rows:
            return P not in option.results and not _is_statistic(item, option, dims)
    return False


def _is_statistic(item: Operator, option: Option, dims: Dims) -> bool:
    try:
        equation = rule_of(item).equation(Instance(item, dims.graph.specs))
    except RuleError:  # a view, which only relates dims
        return False
    return equation.kind(option.factor.split(".")[0]) is not Kind.FREE
