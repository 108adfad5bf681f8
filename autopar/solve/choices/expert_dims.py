"""Which dims are the experts of a mixture: those along which weights choose, or are chosen.

    routed_experts    "own"                      rows choose
    e c m, e m h -> e c h                        experts have rows of their own: a batch of matrices
    b t e h, e h m -> b t e m                    likewise

A batch of matrices of weights shards the weight, the rows and the result by one factor, while others are
summed over, and others are the weight's alone. Heads have such weights, too, as blocks of a diagonal; they
are a part of some other weight's dim, of a projection or norm, which experts never are. Nor are samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autopar.core.graph import Graph, InputKind, Operator
from autopar.core.placement import Shard
from autopar.core.strategy import Option
from autopar.sharding.atoms import Atom, Dims
from autopar.sharding.needed_rows import OWN
from autopar.sharding.strategies import options_of


def expert_dims(graph: Graph, dims: Dims, weights: Collection[str]) -> set[Atom]:
    """The components of atoms that are experts; `weights` are parameters and what is made of them alone."""
    routed, batched = set[Atom](), set[Atom]()
    for item in graph.operators:
        options = options_of(item, dims)
        routed.update(*(_components(dims, item, option) for option in options if option.factor == OWN))
        if any(name in weights for name in item.operands):
            batched.update(*(_components(dims, item, option) for option in _batches(item, options, weights)))
    return routed | batched - set(_parts_of_weights(graph, dims))


def _batches(item: Operator, options: tuple[Option, ...], weights: Collection[str]) -> Iterator[Option]:
    """Options that split a batch of matrices of weights."""
    summed, own = (True, True, False), (True, False, True)  # of weights, rows and result
    found = {option: _sharded(item, option, weights) for option in options if option.shards}
    if {summed, own} <= set(found.values()):
        yield from (option for option, sharded in found.items() if all(sharded))


def _sharded(item: Operator, option: Option, weights: Collection[str]) -> tuple[bool, bool, bool]:
    """Whether an option shards weights, other operands, and the result."""
    pairs = list(zip(item.operands, option.operands, strict=True))
    return (
        any(isinstance(place, Shard) for name, place in pairs if name in weights),
        any(isinstance(place, Shard) for name, place in pairs if name not in weights),
        any(isinstance(place, Shard) for place in option.results),
    )


def _components(dims: Dims, item: Operator, option: Option) -> Iterator[Atom]:
    operands = zip(item.operands, option.operands, strict=True)
    results = zip(item.results, option.results, strict=True)
    for name, place in (*operands, *results):
        if name and isinstance(place, Shard):
            yield dims.component(name, place)


def _parts_of_weights(graph: Graph, dims: Dims) -> Iterator[Atom]:
    """What is a part of a parameter's dim, or a sample."""
    for item in graph.inputs:
        for dim, atoms in enumerate(dims.atoms.of[item.name]):
            own = [dims.atoms.components[item.name, dim, atom] for atom in range(len(atoms))]
            if item.kind is InputKind.PARAMETER and len(own) > 1 or item.kind is InputKind.USER and dim == 0:
                yield from own
