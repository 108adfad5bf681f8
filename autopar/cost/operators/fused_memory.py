"""What a fused group's member does to memory: what stays inside the group has none.

    operators   linear        gelu          dropout       linear
    values      h  written    inside        y  written
    kept        h                           y                      inside: computed again from h
    gradients   of h          inside        of y

An operand that comes by a move from another member is written and kept as outside of a group.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.cost.operators.calls import CallMemory, OperatorCalls
from autopar.cost.operators.fused_groups import Kind, Member
from autopar.cost.operators.saved import SavedTensors


def fused_saved(kept: SavedTensors, member: Member) -> SavedTensors:
    """What backward reads of a member's operands and results, beside what is its own."""
    if member.kind is Kind.VIEW:
        return kept
    return replace(kept, operands=frozenset(member.again_operands), results=frozenset(member.again_results))


def fused_calls(
    found: OperatorCalls,
    member: Member,
    operands: int,
    *,
    moved: Collection[int] = (),
    needed: Collection[int] = (),
) -> OperatorCalls:
    """The calls of a member with so many operands; of these `moved` come from a move, of its results those
    `needed` go into one."""
    if member.kind is Kind.VIEW:
        return found
    inside = {value for place, value in enumerate(found.results) if place not in (*member.writes, *needed)}
    read = {*member.reads, *moved}
    inside |= {place for place in range(operands) if place not in read}
    again = {*member.again_operands, *moved}
    again |= {value for place in member.again_results if (value := found.results[place]) is not None}
    own = {*range(operands), *found.results}
    return replace(found, calls=tuple(_fused(call, inside, again, own) for call in found.calls))


def _fused(
    call: CallMemory, inside: Collection[int | None], again: set[int], own: set[int | None]
) -> CallMemory:
    """Without memory for what stays `inside`; of the values that the operator's `own` callers know, those
    read `again` are kept."""
    return replace(
        call,
        gives=tuple(replace(item, nbytes=0) if item.value in inside else item for item in call.gives),
        gradients=tuple(replace(item, nbytes=0) if item.value in inside else item for item in call.gradients),
        keeps=frozenset(value for value in call.keeps if value not in own)
        | again.intersection({*call.takes, *(item.value for item in call.gives)}),
    )
