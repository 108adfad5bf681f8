"""Graph -> smaller graph: what changes nothing, and what nobody needs, is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.core.graph import Graph, InputKind, Operator, Ref, TensorSpec, map_refs
from autopar.core.operator_facts import facts_of
from autopar.errors import InputError
from autopar.torch_seams.schemas import schema_of
from autopar.trace.forms.spread_out import is_spread_out


def without_identities(graph: Graph) -> Graph:
    """Drop operators that change nothing, and empty operands of cat.

    A copy of a buffer that is written stays: what is read of it later is what it was.
    """
    written = {item.name for item in graph.inputs if item.mutated} | {buffer for buffer, _ in graph.writes}
    same: dict[str, str] = {}
    kept: list[Operator] = []
    for item in graph.operators:
        renamed = map_refs((item.args, item.kwargs), lambda ref: Ref(same.get(ref.name, ref.name)))
        args, kwargs = _nonempty(item, renamed[0], graph.specs), renamed[1]
        operation = replace(item, args=args, kwargs=kwargs)
        is_kept = _copies(operation) and not written.isdisjoint(operation.operands)
        if not is_kept and _changes_nothing(operation, graph.specs):
            pairs = zip(operation.results, operation.operands, strict=False)
            same.update((result, operand) for result, operand in pairs if result)
        else:
            kept.append(operation)
    return replace(
        graph,
        operators=tuple(kept),
        outputs=tuple(same.get(name, name) for name in graph.outputs),
        writes=tuple((buffer, same.get(name, name)) for buffer, name in graph.writes),
        loss=same.get(graph.loss, graph.loss) if graph.loss else None,
    )


def _changes_nothing(item: Operator, specs: dict[str, TensorSpec]) -> bool:
    facts = facts_of(item.target)
    if not facts.is_identity or not item.operands or (facts.changes and facts.changes(item.args)):
        return False
    if is_spread_out(item):
        return False
    pairs = list(zip(item.results, item.operands, strict=False))
    if facts.expands_each:  # with its own operand's gradient or none
        return all(result and specs[result].shape == specs[operand].shape for result, operand in pairs)
    alike = all(result and specs[result] == specs[operand] for result, operand in pairs)
    return alike and len(pairs) == len(item.results)


def _copies(item: Operator) -> bool:
    """Whether the results are in memory of their own, as far as the operator's schema says."""
    return all(each.alias_info is None for each in schema_of(item.target).returns)


def is_identity(item: Operator) -> bool:
    """Whether the operator returns its operand unchanged for some shapes, and is left out then."""
    return facts_of(item.target).is_identity


def _nonempty(item: Operator, args: tuple[Any, ...], specs: dict[str, TensorSpec]) -> tuple[Any, ...]:
    if not facts_of(item.target).skips_empty:
        return args
    full = [ref for ref in args[0] if specs[ref.name].shape != (0,)]
    return (full or args[0], *args[1:])


def without_dead_code(graph: Graph) -> Graph:
    """Operators whose results nobody needs, except those that write running statistics."""
    needed = set(graph.outputs) | {value for _, value in graph.writes}
    mutated = {item.name for item in graph.inputs if item.mutated}
    kept: list[Operator] = []
    for operation in reversed(graph.operators):
        if needed.intersection(operation.results) or mutated.intersection(operation.operands):
            kept.append(operation)
            needed.update(operation.operands)
    inputs = tuple(i for i in graph.inputs if i.kind is not InputKind.CONSTANT or i.name in needed)
    live = needed | {name for item in kept for name in item.results if name} | {i.name for i in inputs}
    specs = {name: spec for name, spec in graph.specs.items() if name in live}
    return replace(graph, inputs=inputs, operators=tuple(reversed(kept)), specs=specs)


def only_loss(graph: Graph) -> Graph:
    """The graph without outputs beside the loss; raises InputError if it has none."""
    if graph.loss is None:
        raise no_loss()
    return without_dead_code(replace(graph, outputs=(graph.loss,)))


def without_gradients(graph: Graph) -> Graph:
    """The graph of a call that wants no gradients: no tensor in it has one."""
    specs = {name: replace(spec, requires_grad=False) for name, spec in graph.specs.items()}
    inputs = tuple(replace(item, spec=specs[item.name]) for item in graph.inputs)
    return replace(graph, inputs=inputs, specs=specs)


def no_loss() -> InputError:
    """The error that a model without a loss can't be trained by steps."""
    return InputError(
        where="loss",
        found="none in the output of the model",
        wanted="a scalar that is the output or its .loss: a step starts backward inside",
        remedy="pass a loss_fn that returns one, and what it takes with every batch",
    )


def with_masks_by_dims(graph: Graph) -> Graph:
    """The graph whose exact random masks are drawn in the order of dims, however operands lie in memory."""
    return replace(graph, operators=tuple(replace(item, order=()) for item in graph.operators))
