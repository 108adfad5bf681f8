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
    """The operands by whose rows those of an operator's results are made, each by those of its number; none
    if that isn't known, or differs between results."""
    rule = rule_of(item)
    if not item.results or None in item.results or is_random(item.target) or rule.reads_values:
        return ()
    op = Instance(item, specs)
    found = [
        dict.fromkeys(_regrouped(op, rule, name) if isinstance(rule, Regroup) else _labelled(op, place))
        if specs[name].shape and specs[name].shape[0] > 1
        else {}
        for place, name in enumerate(item.results)
        if name
    ]
    return tuple(found[0]) if all(each == found[0] for each in found) else ()


def _regrouped(op: Instance, rule: Regroup, result: str) -> Iterator[str]:
    """By relations of groups that both begin with the rows, which are equally many."""
    length = op.specs[result].shape[0]
    for relation in rule.relations(op):
        left, right = relation.left[0], relation.right[0]
        if isinstance(left, tuple) and left[1] == 0 and right == (result, 0):
            yield from (name for name in left[:1] if op.specs[name].shape[0] == length)


def _labelled(op: Instance, place: int) -> Iterator[str]:
    """By the label of the rows of the result at `place`."""
    rule = rule_of(op.operator)
    equation = rule.equation(op)
    label = next(iter(equation.results[place]), None)  # none of an operator without a rule
    if label is None or rule.reads_position(op, label):
        return
    free = (Kind.FREE, Kind.STATISTIC) if facts_of(op.operator.target).joins_samples else (Kind.FREE,)
    if equation.kind(label) not in free or any(label in labels[1:] for labels in equation.operands):
        return
    for name, labels in zip(op.operands, equation.operands, strict=True):
        if labels and labels[0] == label:
            yield name
