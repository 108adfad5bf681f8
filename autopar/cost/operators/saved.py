"""What an operator saves for its backward pass, by the calls that its rule writes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.core.graph import Call
from autopar.core.operator_facts import facts_of
from autopar.cost.operators.halo_convolution import strip_bytes
from autopar.rewrite.emit import GraphEmitter, LocalCall
from autopar.runtime.saved.recompute import stays
from costdb.footprint import footprint


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Tensors that an operator saves for its backward pass: operands and results by position, and bytes of
    its own. `aliases` holds for each result the operand whose memory it shares, or None, and `sizes` the
    bytes of the memory that it lies in; the results `held` stay in memory when the operator is recomputed in
    backward: ranks exchanged them."""

    operands: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    extra_bytes: int = 0
    aliases: tuple[int | None, ...] = ()
    held: frozenset[int] = frozenset()
    sizes: tuple[int, ...] = ()


def stand_ins(emitter: GraphEmitter) -> tuple[LocalCall, ...]:
    """Local calls that cost and save about what collective operators do: a convolution of own rows."""
    found = []
    for node in emitter.graph.nodes:
        local_form = facts_of(node.target).local_form
        if local_form is None:
            continue
        target, args = local_form(node.args)
        operands = tuple(item for item in args if isinstance(item, fx.Node))
        found.append(LocalCall(Call(target, emitter.described(args), {}), operands, (node,)))
    return tuple(found)


def find_saved(
    emitter: GraphEmitter,
    calls: Sequence[LocalCall],
    values: Sequence[Any],
    results: Sequence[Any],
    kind: str,
) -> SavedTensors:
    """Follow memory through the calls of one operator: who saves what, and which results are views."""
    root: dict[Any, Any] = {value: value for value in values}
    saved: set[Any] = set()
    extra = strip_bytes(emitter)
    for written in calls:
        if not written.is_local:
            continue
        found, operands = footprint(written.call, kind), written.operands
        for alias, result in zip(found.aliases, written.results, strict=False):
            root[result] = result if alias is None else root.get(operands[alias], operands[alias])
        saved |= {root.get(operands[index], operands[index]) for index in found.saved.operands}
        saved |= {root[written.results[index]] for index in found.saved.results}
        extra += found.saved.extra_bytes
    places = {value: index for index, value in enumerate(values)}
    ends = {root.get(result, result): index for index, result in enumerate(results)}
    held = set(emitter.known.values())  # from the start, whatever backward needs
    own = [value for value in saved if value not in places and value not in ends and value not in held]
    extra += sum(_nbytes(emitter, value) for value in own)
    return SavedTensors(
        operands=frozenset(places[value] for value in saved if value in places),
        results=frozenset(ends[value] for value in saved if value in ends and value not in places),
        extra_bytes=extra,
        aliases=tuple(places.get(root.get(result, result)) for result in results),
        held=frozenset(index for value, index in ends.items() if _is_held(value)),
        sizes=tuple(_nbytes(emitter, root.get(result, result)) for result in results),
    )


def _nbytes(emitter: GraphEmitter, value: Any) -> int:
    """Bytes of a value's memory; none of results that nobody makes."""
    tensor = emitter.meta.get(value)
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _is_held(node: fx.Node) -> bool:
    """Whether recomputing keeps what the node gives; so it does where ranks exchanged something."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and stays(source.target)
