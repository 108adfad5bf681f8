"""From a graph to its atoms and to every strategy of every operator."""

from __future__ import annotations

import itertools

from autopar.core.graph import Graph, Operator
from autopar.core.strategy import Option, Strategy
from autopar.sharding.atoms import Atoms, Dims
from autopar.sharding.rule import Instance, rule_of


def find_atoms(graph: Graph) -> Atoms:
    """Refine every dim of `graph` over everything that its operators do to it."""
    instances = [(rule_of(item), Instance(item, graph.specs)) for item in graph.operators]
    relations = [relation for rule, op in instances for relation in rule.relations(op)]
    scalings = [scaling for rule, op in instances for scaling in rule.scalings(op)]
    return Atoms(graph, relations, scalings)


def options_of(operation: Operator, dims: Dims) -> tuple[Option, ...]:
    """Every one-axis option of an operator."""
    if operation.name not in dims.options:
        found = rule_of(operation).options(Instance(operation, dims.graph.specs), dims.atoms)
        dims.options[operation.name] = tuple(found)
    return dims.options[operation.name]


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
    return all(operands) and all(results)


def strategies_of(operation: Operator, dims: Dims) -> tuple[Strategy, ...]:
    """Every legal strategy: an option for each axis."""
    if operation.name not in dims.strategies:
        every = itertools.product(options_of(operation, dims), repeat=len(dims.mesh.shape))
        legal = (strategy for strategy in every if is_legal(operation, strategy, dims))
        dims.strategies[operation.name] = tuple(legal)
    return dims.strategies[operation.name]
