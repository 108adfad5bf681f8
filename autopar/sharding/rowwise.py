"""Operators that work row by row: row k of the result follows from rows k of some operands.

    linear      "n i+, o i+, o& -> n o"     by the rows of operand 0: n comes first in it and in the result
    transpose   "a b -> b a"                by none: the rows of the result are columns

A rule says so: the factor of the result's first dim is free, and comes first wherever an operand has it.
Batch norms take rows in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.core.graph import Operator, TensorSpec
from autopar.core.operator_facts import facts_of, is_random
from autopar.sharding.equation import Kind
from autopar.sharding.rule import Instance, Regroup, rule_of


def rowwise(item: Operator, specs: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """The operands by whose rows the rows of the operator's one result are made, each by those of its number;
    none if that isn't known."""
    if len(item.results) != 1 or item.results[0] is None or is_random(item.target):
        return ()
    shape, rule = specs[item.results[0]].shape, rule_of(item)
    if not shape or shape[0] < 2 or rule.reads_values:
        return ()
    op = Instance(item, specs)
    return tuple(dict.fromkeys(_regrouped(op, rule) if isinstance(rule, Regroup) else _labelled(op)))


def _regrouped(op: Instance, rule: Regroup) -> Iterator[str]:
    """By relations of groups that both begin with the rows, which are equally many."""
    result, length = op.operator.results[0], op.result_shape()[0]
    for relation in rule.relations(op):
        left, right = relation.left[0], relation.right[0]
        if isinstance(left, tuple) and left[1] == 0 and right == (result, 0):
            yield from (name for name in left[:1] if op.specs[name].shape[0] == length)


def _labelled(op: Instance) -> Iterator[str]:
    """By the label of the result's rows."""
    rule = rule_of(op.operator)
    equation = rule.equation(op)
    label = next(iter(equation.results[0]), None)  # none of an operator without a rule
    if label is None or rule.reads_position(op, label):
        return
    free = (Kind.FREE, Kind.STATISTIC) if facts_of(op.operator.target).joins_samples else (Kind.FREE,)
    if equation.kind(label) not in free or any(label in labels[1:] for labels in equation.operands):
        return
    for name, labels in zip(op.operands, equation.operands, strict=True):
        if labels and labels[0] == label:
            yield name
