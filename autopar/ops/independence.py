"""Whether the samples of a batch go through a graph independently of each other.

Then micro-batches compute together what the batch computes at once. A batch norm, a softmax over the batch,
an operator without a rule, or anything that has the sample factor but cannot be sharded by it, mixes them.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar.core.graph import Graph, InputKind, Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import P, Shard
from autopar.errors import RuleError
from autopar.ops.analysis import find_atoms, options_of
from autopar.ops.dims import Atom, Dims
from autopar.ops.equation import Kind, Option
from autopar.ops.rule import Instance, rule_of


def mixing_operator(graph: Graph, samples: int, *, end: Operator | None) -> Operator | None:
    """The first operator that mixes samples before `end`, which makes one number of them all; None if
    there is none. User inputs whose dim 0 is `samples` long hold a row for each."""
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    batch = {
        dims.atoms.components[(item.name, 0, 0)]
        for item in graph.inputs
        if item.kind is InputKind.USER and item.spec.shape and item.spec.shape[0] == samples
    }
    for item in graph.operators:
        if item is end:
            return None
        if any(_has(name, dims, batch) for name in item.operands) and not _keeps_apart(item, dims, batch):
            return item
    return None


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
