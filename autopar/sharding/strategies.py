"""From a graph to its atoms and to every strategy of every operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from autopar.core.graph import Graph, Operator, map_refs
from autopar.core.mesh import Mesh
from autopar.core.strategy import Option, Strategy
from autopar.sharding.atoms import Atoms, Dims
from autopar.sharding.rule import Instance, rule_of

MOST_SHARED = 256  # lists of strategies that operators of any sizes share
_NUMBERS: dict[object, int] = {}  # of traits, in the order in which they were met


def find_atoms(graph: Graph) -> Atoms:
    """Refine every dim of `graph` over everything that its operators do to it; done once for a graph."""
    if "atoms" not in graph.derived:
        graph.derived["atoms"] = _refine(graph)
    atoms: Atoms = graph.derived["atoms"]
    return atoms


def dims_of(graph: Graph, mesh: Mesh, imbalance: float | None = None) -> Dims:
    """The dims of `graph` as they are cut on a mesh; `imbalance` is what is expected of routers, None for
    what was measured."""
    return Dims(graph, find_atoms(graph), mesh, imbalance)


def _refine(graph: Graph) -> Atoms:
    instances = [(rule_of(item), Instance(item, graph.specs)) for item in graph.operators]
    relations = [relation for rule, op in instances for relation in rule.relations(op)]
    scalings = [scaling for rule, op in instances for scaling in rule.scalings(op)]
    values = {item.name: item.value for item in graph.inputs if item.value is not None}
    tables = [table for rule, op in instances for table in rule.tables(op, values)]
    return Atoms(graph, relations, scalings, tables)


def sign_of(operation: Operator, dims: Dims) -> int:
    """A number that operators have in common whose strategies and local shapes are the same on a mesh: those
    that do the same to tensors that are alike and cut alike, in whatever graph."""
    if operation.name not in dims.sign_of:
        specs = dims.graph.specs
        names = (*operation.operands, *operation.results)
        atoms = [
            dims.atoms.components[name, dim, atom]
            for name in names
            if name is not None
            for dim, parts in enumerate(dims.atoms.of[name])
            for atom in range(len(parts))
        ]
        order = {atom: number for number, atom in enumerate(dict.fromkeys(atoms))}
        sign = (
            operation.target,
            text_of(operation, lambda name: str(specs[name])),
            tuple((specs[name], dims.atoms.of[name]) if name else None for name in names),
            tuple(order[atom] for atom in atoms),
            tuple(dims.way_of_cutting(atom) for atom in order),
            dims.imbalance,
            dims.graph.loads,
        )
        dims.sign_of[operation.name] = number_of(sign)
    return dims.sign_of[operation.name]


def number_of(traits: object) -> int:
    """The process's number for traits, which equal ones share: a short key for long ones."""
    return _NUMBERS.setdefault(traits, len(_NUMBERS))


def text_of(operation: Operator, show: Callable[[str], str]) -> str:
    """An operator's arguments as far as strategies and costs depend on them, operands as `show` names them.

    Blocks whose paths are dropped ever more often, x / 0.98, x / 0.96 ..., are equal so.
    """
    args = map_refs((operation.args, operation.kwargs), lambda ref: show(ref.name))
    return str(_without_numbers(args) if rule_of(operation).numbers_alike else args)


def _without_numbers(tree: Any) -> Any:
    match tree:
        case float() if tree not in (0.0, 1.0):
            return "number"
        case tuple() | list():
            return type(tree)(map(_without_numbers, tree))
        case dict():
            return {name: _without_numbers(item) for name, item in tree.items()}
        case _:
            return tree


def options_of(operation: Operator, dims: Dims) -> tuple[Option, ...]:
    """Every one-axis option of an operator; equal operators share them."""
    sign = sign_of(operation, dims)
    if sign not in dims.options:
        found = rule_of(operation).options(Instance(operation, dims.graph.specs), dims.atoms)
        dims.options[sign] = _one_of_equals(tuple(found))
    return dims.options[sign]


@lru_cache(maxsize=MOST_SHARED)
def _one_of_equals(options: tuple[Option, ...]) -> tuple[Option, ...]:
    """One object of equal options, which operators of other sizes share."""
    return options


def is_legal(operation: Operator, strategy: Strategy, dims: Dims) -> bool:
    """Whether every shard of the strategy's layouts exists and has rows on every rank."""
    operands = (
        dims.legal(name, tuple(option.operands[index] for option in strategy))
        for index, name in enumerate(operation.operands)
    )
    results = (
        dims.legal(name, tuple(option.results[index] for option in strategy))
        for index, name in enumerate(operation.results)
        if name is not None
    )
    return all(operands) and all(results) and rule_of(operation).fits(strategy)


def strategies_of(operation: Operator, dims: Dims) -> tuple[Strategy, ...]:
    """Every legal strategy: an option for each axis; equal operators share them."""
    sign = sign_of(operation, dims)
    if sign not in dims.strategies:
        options, axes = options_of(operation, dims), len(dims.mesh.shape)
        legal = tuple(is_legal(operation, strategy, dims) for strategy in _every(options, axes))
        dims.strategies[sign] = _legal(options, axes, legal)
    return dims.strategies[sign]


@lru_cache(maxsize=MOST_SHARED)
def _every(options: tuple[Option, ...], axes: int) -> tuple[Strategy, ...]:
    """An option for each axis, in all ways; operators of other sizes share them."""
    return tuple(itertools.product(options, repeat=axes))


@lru_cache(maxsize=MOST_SHARED)
def _legal(options: tuple[Option, ...], axes: int, legal: tuple[bool, ...]) -> tuple[Strategy, ...]:
    return tuple(itertools.compress(_every(options, axes), legal))
