"""What a fused group's member does to memory: what stays inside the group has none.

    operators   linear        gelu          dropout       linear
    values      h  written    inside        y  written
    saved       h                           y                      inside: recomputed from h
    gradients   of h          inside        of y

An operand that comes by a move from another member is written and kept as outside of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar.core.graph import TensorSpec
from autopar.cost.operators.calls import CallMemory, OperatorCalls
from autopar.cost.operators.fused_groups import OperatorTraffic, TrafficKind
from autopar.cost.operators.fused_prices import saved_own_bytes
from autopar.cost.operators.saved import SavedTensors


def fused_saved(saved: SavedTensors, member: OperatorTraffic, operands: Sequence[TensorSpec]) -> SavedTensors:
    """Tensors that a fused operator saves: operands and results that backward reads, and bytes of its own."""
    if member.kind is TrafficKind.VIEW:
        return saved
    return replace(
        saved,
        operands=frozenset(member.reread_operands),
        results=frozenset(member.reread_results),
        extra_bytes=saved_own_bytes(member, saved.extra_bytes, operands),
    )


def fused_calls(
    found: OperatorCalls,
    member: OperatorTraffic,
    operands: Sequence[TensorSpec],
    *,
    moved: Collection[int] = (),
    needed: Collection[int] = (),
) -> OperatorCalls:
    """Memory calls of a fused operator: values that stay inside the kernel take no bytes. Operands in `moved`
    come from a conversion, results in `needed` go into one."""
    if member.kind is TrafficKind.VIEW:
        return found
    inside = {value for place, value in enumerate(found.results) if place not in (*member.writes, *needed)}
    read = {*member.reads, *moved}
    inside |= {place for place in range(len(operands)) if place not in read}
    reread = {*member.reread_operands, *moved}
    reread |= {value for place in member.reread_results if (value := found.results[place]) is not None}
    known = {*range(len(operands)), *found.results}

    def fused(call: CallMemory) -> CallMemory:
        passing = {*call.takes, *(item.value for item in call.gives)}
        return replace(
            call,
            gives=tuple(replace(item, nbytes=0) if item.value in inside else item for item in call.gives),
            gradients=tuple(
                replace(item, nbytes=0) if item.value in inside else item for item in call.gradients
            ),
            saves=frozenset(value for value in call.saves if value not in known) | (reread & passing),
            own=saved_own_bytes(member, call.own, operands),
            forward_scratch=0,
            backward_scratch=0,
        )

    return replace(found, calls=tuple(fused(call) for call in found.calls))
